"""opsbyte: why LLM inference is slow, computed, measured and proven.

Import what you need: `from opsbyte import hardware, models, cost, roofline`.
The analytic core (hardware, models, cost, roofline) needs only the standard
library; everything else needs numpy or torch, imported when it is used.
"""

__version__ = "0.1.0"
