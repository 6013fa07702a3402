"""Tasks that only measurements use: generated ones, which `kvlens.tasks` finds by TASKS, and files of published
benchmarks, which it finds by FILES."""

TASKS = {
    "niah_noise": "kvlens.lab.tasks.shelves:NOISY",
    "niah_identifier": "kvlens.lab.tasks.shelves:IDENTIFIER",
    "niah_needles": "kvlens.lab.tasks.shelves:AMONG",
    "niah_needles_identifier": "kvlens.lab.tasks.shelves:IDENTIFIERS",
    "niah_kinds": "kvlens.lab.tasks.kinds:KINDS_OF_ANSWERS",
    "variable_tracking": "kvlens.lab.tasks.tracking:TRACKING",
    "common_words": "kvlens.lab.tasks.common:COMMON_WORDS",
    "frequent_words": "kvlens.lab.tasks.frequent:FREQUENT_WORDS",
    "list_items": "kvlens.lab.tasks.copying:ITEMS",
    "copy_text": "kvlens.lab.tasks.copying:COPY",
}
"""name of a generated task -> place of its object"""

FILES = {
    "longbench": "kvlens.lab.tasks.longbench:LongBench",
    "longbenchkv": "kvlens.lab.tasks.longbenchkv:LongBenchRows",
    "longbench2": "kvlens.lab.tasks.longbench2:LongBench2",
    "ruler": "kvlens.lab.tasks.rulerfile:RulerFile",
    "rulerkv": "kvlens.lab.tasks.rulerkv:RulerRows",
    "infinitebench": "kvlens.lab.tasks.infinitebench:InfiniteBench",
    "infinitebenchkv": "kvlens.lab.tasks.infinitebenchkv:InfiniteBenchRows",
    "scbench": "kvlens.lab.tasks.scbench:SCBench",
    "gsm8k": "kvlens.lab.tasks.gsm8k:Gsm8k",
    "math500": "kvlens.lab.tasks.math500:Math500",
    "aime24": "kvlens.lab.tasks.aime24:Aime24",
    "gpqa": "kvlens.lab.tasks.gpqa:Gpqa",
    "longgenbench-wu": "kvlens.lab.tasks.longgenbench_wu:LongGenBenchWu",
    "longgenbench-liu": "kvlens.lab.tasks.longgenbench_liu:LongGenBenchLiu",
    "niah": "kvlens.lab.tasks.haystack:Haystack",
}
"""kind of file -> place of its class"""
