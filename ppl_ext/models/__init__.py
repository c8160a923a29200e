"""Reference problems: models, data and what is known of their posteriors.

`list` names the problems, `load` returns one as a `Problem`.
"""

if __name__ != "ppl_ext.models":
    raise ImportError("import ppl_ext.models, not models")

from ppl_ext.models.problem import Problem, load
from ppl_ext.models.problem import list_problems as list

__all__ = ["Problem", "list", "load"]
