"""What is written in Pyro is collected for doctests only where Pyro is installed."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("pyro") else ["ppl_ext/pyro/*.py", "ppl_ext/models/pyro_programs.py"]
)
