"""The book's eight stages, and the harness that hands them out and judges a reader's work.

    chNN_name/   one stage: solution.py, chapter.py (tasks and hints), mutants.py, its tests
    catalog.py   what a chapter, a task and a mutant are
    stages.py    which file a stage's code comes from

`python -m chapters` is the way in.
"""
