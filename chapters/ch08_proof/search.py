"""Given: where the tests of this chapter look, and for how long."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

# The same examples every time, few enough to wait for; play_rare_cases() has what they rarely hit.
# On wrong code the first failure is enough: no time goes into making it shorter.
SEARCH = settings(
    max_examples=100,
    stateful_step_count=25,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

# Few tokens and common openings: prompts often share a prefix, and often end at a block's edge.
# 1 and 257 have the same last byte.
OPENINGS = st.sampled_from([[0], [0, 1, 2, 3], list(range(8)), list(range(12)), [0, 5, 6, 7]])
TAILS = st.one_of(st.just([]), st.lists(st.sampled_from([1, 2, 257]), max_size=8))
PROMPTS = st.builds(lambda opening, tail: opening + tail, OPENINGS, TAILS)

# Fields that look alike when they are written one after another.
FIELDS = st.sampled_from([("",), ("a", "b"), ("ab",)])
