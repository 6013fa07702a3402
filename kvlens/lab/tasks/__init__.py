"""Files of published benchmarks as tasks. `kvlens.tasks` finds them by FILES."""

FILES = {
    "longbench": "kvlens.lab.tasks.longbench:LongBench",
    "longbench2": "kvlens.lab.tasks.longbench2:LongBench2",
    "ruler": "kvlens.lab.tasks.rulerfile:RulerFile",
    "rulerkv": "kvlens.lab.tasks.rulerkv:RulerRows",
    "infinitebench": "kvlens.lab.tasks.infinitebench:InfiniteBench",
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
