"""Sentences of pages that say what is missing, what was not recorded, and what a button does.

Pages show them by name, and tests name them, so that a sentence is mended here alone."""

from __future__ import annotations

ANSWER_NOT_IN_TEXT = "The text does not contain the expected answer, so the output must be worked out from the text."
BESIDE_MODEL = "beside the model, at least"
COMPARE_ALL_STEPS = "Compare all steps with full KV"
LAST_TOKEN_IN_WINDOW = (
    "The last prompt token belongs to the window: its query was seen under full attention when prefill ended. Step 0 "
    "feeds the token."
)
LOOP_TIME = "in the decode loop, mean (ms)"
LOSS_NOT_RECORDED = (
    "**What this run lost against full KV was not recorded.** A repeat on full KV's tokens compares every step."
)
METHOD_NOT_LISTED = "This method is not among those listed here, so only what the trace says of it can be shown."
MOVED_TO_DEVICE = "moved to the device, all steps"
NEVER_REBUILT = "Never rebuilt after prefill."
NOTHING_COPIED = "nothing was copied or moved"
NOTHING_IN_HOST_MEMORY = "No token was in host memory at any step."
NOTHING_MOVED = "This run moved nothing between the tiers: all it kept stayed on the device."
NOTHING_MOVED_IN_VAIN = "Nothing moved to the device while decoding, so nothing was moved in vain."
NOTHING_SELECTED = (
    "This run selected nothing after its first step: all tokens stayed on the device, or it had one step."
)
NOT_TRUNCATED = "This run did not truncate (truncate=off): every KV head reused all it could."
NO_BUS = "No GPU's bus was measured yet (docs/evidence/performance.md). This run's own copies are timed above."
NO_COPY = "No copy was made while decoding, so the engine waited for none."
NO_FACTORS = "No span of this run is stored as factors, so no span is rebuilt with an error."
NO_FIGURES_PER_STEP = "All steps: this run keeps no figures per step."
NO_HEAD_SCORES = (
    "Head scores were not recorded: this run used no calibration, so all heads of a layer chose the layer's tokens."
)
NO_KNOWN_ANSWER = "No run has a known answer yet. The generated tasks of New run come with one."
NO_LAYER_ERRORS = " Layer errors were not recorded: this run used no calibration."
NO_LENGTH_AND_DEPTH = "The prompts of this task have no length and depth to order them by; here are its mean scores."
NO_LIMIT_SET = "no limit was set, so there is no budget line"
NO_PAGE_COMPLETED = "No page was completed while decoding, so nothing could trigger a reconstruction."
NO_QUESTION_START = (
    "This prompt does not say where its question begins: write the question below the text, or choose 'in'."
)
NO_RANKS = "This run has no ranks: its spans are stored exactly."
NO_REFERENCE_MASS = " Full KV's own mass was not recorded for this head at this step."
NO_REASON = "The run failed and gave no reason."
NO_RUNS = "There are no runs yet."
NO_SELECTION = (
    "No selection was recorded: the prompt and what was generated fill less than a page, or the run logged no journal."
)
NO_SPAN_KEYS = "The keys of this run's spans were not recorded, so there is no map of them."
NO_SPAN_SCORES = "Scores of spans were not recorded at this step."
NO_TOKEN_BUDGET = "The token budget was not recorded: no layer of this run selects."
ONE_RUN = "There is one run, and a comparison takes two."
ONE_RUN_NAMED = "one run was named; comparing it with another"
ON_DEVICE = "On the device, mean over all steps"
PCA_DISTANCES = "A distance in PCA is a distance of keys, reduced to two components. It is not attention."
RACE_BUDGET = "Budget of the race"
RUN_SAMPLE = "Run the sample prompt"
RUN_TRIAL_AGAIN = "Run this trial again and open it in Replay"
SMALLEST_SET = "Find the smallest set of heads"
TWO_READABLE_RUNS = "A comparison takes two runs that can be read; choose another one."
TWO_SYSTEM_MESSAGES = "The messages begin with a system message: leave System message empty."
USE_NOT_KNOWN = "Which spans query heads attended was not recorded in this run, so the use of what moved is not known."
WATCH_LOSS = "Watch a real model lose an answer"
OBSERVED_HOLD = (
    "Your own code generated this run, so this page cannot repeat it. To hold or drop spans, generate again inside "
    "`kvlens.observe(model, tokenizer, repeat=run, hold=[...])`."
)
