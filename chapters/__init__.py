"""The book's eight stages, and the harness that hands them out and judges a reader's work.

    chNN_name/     one stage: solution.py, chapter.py (tasks and hints), mutants.py, its tests

What there is
    catalog        what a chapter, a task and a mutant are      contents   all of them, by number
    stages         which file a stage's code comes from
    regions        stub and mutant, made from a solution        targets    whose code is tested
    workbook       a reader's files, and how far they are

Running tests: jobs and conftest in the pytest process, the others before and after it
    testing        what a chapter's tests are written with      limits     no endless loops
    conftest       on whose code, and what a failure shows
    checking       start that process       jobs       many targets in one process
    results        what it is told, and what it tells
    prove          what must hold of every task

Telling a failure
    observe        which operations led there      snapshot   how pool and queues stand
    picture        both as text                    trace      both for the player
    explain        all of it, from an exception    failure    as data      report   as lines

The command line, `python -m chapters`
    cli, commands, terminal, progress (check, status), watch, diff, doctor
    running, engine, model      the engine that the stages add up to, with a real model
    measuring                   whose code a chapter's own measurement runs
"""
