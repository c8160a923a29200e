"""Dirichlet and Pitman-Yor processes as parts of a NumPyro model.

Run forward, a process is exact and has no truncation level: the labels of n points come from
the Chinese restaurant, and the n atoms that they can need from the base distribution. Under
`DPSlice` the kernel answers `draw`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
from jax import lax, random
from numpyro.distributions import Distribution, constraints
from numpyro.handlers import block, condition, seed, substitute, trace
from numpyro.primitives import _PYRO_STACK, plate

from ppl_ext.errors import UnsupportedModelError
from ppl_ext.kernels.dp_slice import log_partition
from ppl_ext.target import Array, PyTree

# what a kernel puts in the place of `draw`
_answer: ContextVar[Callable[[Any, str, int], PyTree] | None] = ContextVar("answer", default=None)


@contextmanager
def answering(answer: Callable[[Any, str, int], PyTree]) -> Iterator[None]:
    """Within, `process.draw()` returns `answer(process, plate_name, num_points)`."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


class DirichletProcess:
    """A random discrete distribution over atoms: G ~ DP(concentration, base).

    Parameters
    ----------
    name : str
        Name of the process; its sites are `<name>_labels`, `<name>_weights`,
        `<name>_num_clusters`.
    concentration : float or Array
        Positive number, or a site. n points have about concentration * log(n) clusters.
    base : callable
        `base()`: the sites of one atom, returning their values in any structure. Sites that are
        vectors need `to_event`. It may use sites of the model outside of the data plate.

    Raises
    ------
    ppl_ext.errors.UnsupportedModelError
        By `draw`: not inside one plate of dimension -1; a site of `base` with a batch shape.

    Notes
    -----
    `draw()` inside the data plate gives each point's atom, each leaf with the leading size n. Run
    forward (`Predictive`), the model draws labels, a site that belongs to kernels that know it, and
    the values of the atoms' sites. With draws of `DPSlice` in `Predictive`, points come from the
    posterior of G, and where its mass is not instantiated, from new atoms.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import Predictive
    >>> from ppl_ext.numpyro import DirichletProcess
    >>> def base():
    ...     return numpyro.sample("mu", dist.Normal(0, 10))
    >>> def model(n, y=None):
    ...     G = DirichletProcess("G", 1.0, base)
    ...     with numpyro.plate("data", n):
    ...         mu = G.draw()
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> Predictive(model, num_samples=5)(jax.random.key(0), 100)["G_labels"].shape
    (5, 100)
    """

    def __init__(self, name: str, concentration: Any, base: Callable[[], PyTree]) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{type(self).__name__}: `name` must be a text, got {name!r}.")
        if isinstance(base, Distribution) or not callable(base):
            raise TypeError(
                f"{type(self).__name__}: `base` must be a function that samples one atom, such as "
                f'`lambda: numpyro.sample("mu", dist.Normal(0, 1))`, got {type(base).__name__}.'
            )
        self.name = name
        self.concentration = concentration
        self.base = base
        self.discount: Any = None
        self._check("concentration", concentration, lambda x: x > 0, "be positive")

    def draw(self) -> PyTree:
        """The atom of each point of the plate around."""
        plates = [handler for handler in _PYRO_STACK if isinstance(handler, plate)]
        if len(plates) != 1 or plates[0].dim != -1:
            raise UnsupportedModelError(
                f"`{self.name}.draw()` must be called inside one plate, that of the data, with dim "
                f"-1; found the plates {[(p.name, p.dim) for p in plates]}."
            )
        (data,) = plates
        if data.subsample_size < data.size:
            raise UnsupportedModelError(
                f"`{self.name}.draw()` needs all points of plate '{data.name}', which draws "
                f"{data.subsample_size} of {data.size}. Drop `subsample_size`."
            )
        answer = _answer.get()
        if answer is not None:
            return answer(self, data.name, data.size)
        with WithoutPlate(data.name):
            return self._draw_forward(data.size)

    # --- one atom --------------------------------------------------------------------------------

    def atom_sites(self, key: Array, values: dict[str, Array] | None = None) -> dict[str, Any]:
        """Messages of the base's sites for one atom, drawn or at `values`."""
        with block():
            messages = trace(seed(substitute(self.base, data=values or {}), key)).get_trace()
        sites = {n: m for n, m in messages.items() if m["type"] == "sample"}
        for name, message in sites.items():
            if message["fn"].batch_shape:
                raise UnsupportedModelError(
                    f"Site '{name}' of the base of '{self.name}' has the batch shape "
                    f"{message['fn'].batch_shape}. Make it part of the event with `.to_event`."
                )
            if message["fn"].support is not None and message["fn"].support.is_discrete:
                raise UnsupportedModelError(
                    f"Site '{name}' of the base of '{self.name}' is discrete "
                    f"({type(message['fn']).__name__}). Atoms have continuous sites only."
                )
            if message["is_observed"]:
                raise UnsupportedModelError(
                    f"Site '{name}' of the base of '{self.name}' is observed; the base holds the "
                    "unknowns of one atom."
                )
        if not sites:
            raise UnsupportedModelError(f"The base of '{self.name}' has no sample site.")
        return sites

    def atom_value(self, values: dict[str, Array]) -> PyTree:
        """What the base returns at these values of its sites."""
        with block():
            return seed(substitute(self.base, data=values), random.key(0))()

    # --- forward ---------------------------------------------------------------------------------

    def _draw_forward(self, n: int) -> PyTree:
        weights = _substituted(f"{self.name}_weights")
        if weights is None:
            labels = numpyro.sample(f"{self.name}_labels", self._partition(n))
            atoms = self._new_atoms(n)
        else:
            labels, atoms = self._draw_posterior(n, jnp.asarray(weights))
        for name, values in atoms.items():
            numpyro.deterministic(name, values)
        ones = jnp.zeros(jax.tree.leaves(atoms)[0].shape[0], jnp.int32).at[labels].set(1)
        numpyro.deterministic(f"{self.name}_num_clusters", jnp.sum(ones))
        return jax.vmap(self.atom_value)({k: v[labels] for k, v in atoms.items()})

    def _draw_posterior(self, n: int, weights: Array) -> tuple[Array, dict[str, Array]]:
        """Labels and atoms given the instantiated part of G, then from the rest of its mass."""
        capacity = weights.shape[0]
        key_pick, key_rest = random.split(numpyro.prng_key())
        known = {name: _substituted(name) for name in self.atom_sites(random.key(0))}
        missing = [name for name, values in known.items() if values is None]
        if missing:
            raise ValueError(
                f"The draws hold '{self.name}_weights' but not the atoms' sites {missing}. Pass "
                "all of `mcmc.get_samples()`."
            )
        with_rest = jnp.append(weights, jnp.maximum(1 - jnp.sum(weights), 0.0))
        labels = random.categorical(key_pick, jnp.log(with_rest), shape=(n,))
        discount = 0.0 if self.discount is None else self.discount
        rest = _restaurant(key_rest, n, self.concentration + capacity * discount, self.discount)
        labels = jnp.where(labels == capacity, capacity + rest, labels)
        new = self._new_atoms(n)
        # draws after an overflow predict nothing
        lost = jnp.where(jnp.isnan(jnp.sum(weights)), jnp.nan, 0.0)
        atoms = {k: jnp.concatenate([jnp.asarray(v), new[k]]) + lost for k, v in known.items()}
        numpyro.deterministic(f"{self.name}_labels", labels)
        return labels, atoms

    def _new_atoms(self, n: int) -> dict[str, Array]:
        def one(key: Array) -> dict[str, Array]:
            return {name: m["value"] for name, m in self.atom_sites(key).items()}

        return jax.vmap(one)(random.split(numpyro.prng_key(), n))

    def _partition(self, n: int) -> Distribution:
        return Partition(n, self.concentration, self.discount)

    def _check(self, argument: str, value: Any, fits: Callable[[float], bool], law: str) -> None:
        if jnp.ndim(value):
            raise ValueError(
                f"{type(self).__name__}: `{argument}` of '{self.name}' must be a number, got shape "
                f"{jnp.shape(value)}."
            )
        if isinstance(value, (int, float)) and not fits(value):
            raise ValueError(
                f"{type(self).__name__}: `{argument}` of '{self.name}' must {law}, got {value!r}."
            )


class PitmanYor(DirichletProcess):
    """The Pitman-Yor process: as `DirichletProcess`, with about n^discount clusters.

    Parameters
    ----------
    name : str
        As for `DirichletProcess`.
    concentration : float or Array
        As for `DirichletProcess`.
    discount : float or Array
        Number in [0, 1), or a site; 0 is the Dirichlet process.
    base : callable
        As for `DirichletProcess`.

    Examples
    --------
    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import Predictive
    >>> from ppl_ext.numpyro import PitmanYor
    >>> def model(n):
    ...     G = PitmanYor("G", 1.0, 0.5, lambda: numpyro.sample("mu", dist.Normal(0, 10)))
    ...     with numpyro.plate("data", n):
    ...         numpyro.deterministic("theta", G.draw())
    >>> Predictive(model, num_samples=5)(jax.random.key(0), 100)["theta"].shape
    (5, 100)
    """

    def __init__(
        self, name: str, concentration: Any, discount: Any, base: Callable[[], PyTree]
    ) -> None:
        super().__init__(name, concentration, base)
        self._check("discount", discount, lambda x: 0 <= x < 1, "lie in [0, 1)")
        self.discount = discount

    def _partition(self, n: int) -> Distribution:
        return PitmanYorPartition(n, self.concentration, self.discount)


class Partition(Distribution):
    """Labels of n points under a process: 0, 1, ... in the order of appearance.

    Parameters
    ----------
    num_points : int
        n.
    concentration, discount : float or Array
        Of the process.
    """

    pytree_data_fields = ("concentration", "discount")
    pytree_aux_fields = ("num_points",)
    support = constraints.independent(constraints.nonnegative_integer, 1)

    def __init__(self, num_points: int, concentration: Any, discount: Any = None) -> None:
        self.num_points, self.concentration, self.discount = num_points, concentration, discount
        super().__init__(batch_shape=(), event_shape=(num_points,), validate_args=False)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        one = lambda key: _restaurant(key, self.num_points, self.concentration, self.discount)  # noqa: E731
        if not sample_shape:
            return one(key)
        keys = random.split(key, sample_shape)
        for _ in sample_shape:
            one = jax.vmap(one)
        return one(keys)

    def log_prob(self, value: Array) -> Array:
        counts = jnp.zeros(self.num_points, jnp.int32).at[value].add(1)
        return log_partition(counts, jnp.asarray(self.concentration, float), self.discount)


class PitmanYorPartition(Partition):
    """As `Partition`, under a name of its own in tables."""


def _restaurant(key: Array, n: int, concentration: Any, discount: Any) -> Array:
    """Labels of n points, one after the other: a point follows a random earlier one or is new.

    Of the mass i + alpha at point i, alpha + H d belongs to a new cluster. The d of each cluster
    is taken from its founder: a point that would follow a founder is new with probability d.
    """
    d = 0.0 if discount is None else discount
    keys = random.split(key, 3)
    u, v = random.uniform(keys[0], (n,)), random.uniform(keys[1], (n,))
    earlier = random.randint(keys[2], (n,), 0, jnp.maximum(jnp.arange(n), 1))

    def one(carry: tuple[Array, Array, Array], x: tuple[Array, ...]) -> Any:
        labels, founder, clusters = carry
        i, u, v, j = x
        new = (i == 0) | (u * (i + concentration) >= i) | (founder[j] & (v < d))
        label = jnp.where(new, clusters, labels[j])
        carry = labels.at[i].set(label), founder.at[i].set(new), clusters + new
        return carry, None

    start = (jnp.zeros(n, jnp.int32), jnp.zeros(n, bool), jnp.zeros((), jnp.int32))
    return lax.scan(one, start, (jnp.arange(n), u, v, earlier))[0][0]


def _substituted(name: str) -> Any:
    """The value that a `substitute` or `condition` around gives to a site, or None."""
    message: Any = {"type": "sample", "name": name, "value": None, "is_observed": False}
    # strategies for starting values leave discrete sites alone
    fn = Partition(1, 1.0)
    message |= {"fn": fn, "args": (), "kwargs": {}, "infer": {}, "cond_indep_stack": []}
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, (substitute, condition)) and message["value"] is None:
            handler.process_message(message)
    return message["value"]


class WithoutPlate(numpyro.primitives.Messenger):
    """Handler under which sites do not belong to a plate around."""

    def __init__(self, name: str) -> None:
        super().__init__(None)
        self._name = name

    def process_message(self, message: Any) -> None:
        infer = message.setdefault("infer", {})
        infer["block_plates"] = (*infer.get("block_plates", ()), self._name)
