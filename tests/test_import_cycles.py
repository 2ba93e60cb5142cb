"""No circle of imports: whatever a module needs can be read, tested and moved before the module itself.

Imports inside functions count as well as those at the top: they put a circle off until somebody calls the function, and
a reader goes round it all the same.  So do those for type checkers alone.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise

from tests.test_architecture import SOURCES, imports, module_name

Imports = Mapping[str, Mapping[str, int]]
"""For each module those that it imports, with the line that first does."""


def import_graph() -> Imports:
    """Who imports whom among the modules of the package.

    A name without dots can be a neighbour in the same folder: the files that run inside the sandbox are alone there.
    """
    graph: dict[str, dict[str, int]] = {module_name(path): {} for path in SOURCES}
    for path in SOURCES:
        module = module_name(path)
        for line, name in imports(path):
            found = name if name in graph else f"{module.rpartition('.')[0]}.{name}"
            if found in graph:
                graph[module].setdefault(found, line)
    return graph


def shortest_way_back(graph: Imports, module: str) -> list[str] | None:
    """The fewest imports that lead from a module to itself: the modules on the way, this one first and last."""
    before: dict[str, str] = {}
    waiting = deque([module])
    while waiting:
        here = waiting.popleft()
        for imported in graph[here]:
            if imported not in before:
                before[imported] = here
                waiting.append(imported)
    if module not in before:
        return None
    way = [module, before[module]]
    while way[-1] != module:
        way.append(before[way[-1]])
    return way[::-1]


def circles(graph: Imports) -> Iterator[str]:
    """The circles, as `a:3 -> b:7 -> a` with the line of each import; those that share a module count as one."""
    shown: set[str] = set()
    for module in graph:
        way = shortest_way_back(graph, module)
        if way is not None and not shown.intersection(way):
            shown.update(way)
            steps = [f"{here}:{graph[here][there]}" for here, there in pairwise(way)]
            yield " -> ".join([*steps, way[-1]])


def test_no_module_of_the_package_imports_itself_by_way_of_others() -> None:
    found = list(circles(import_graph()))
    assert not found, "circles of imports:\n" + "\n".join(found)


def test_the_graph_has_the_imports_of_the_whole_package() -> None:
    """Else the test above would pass on nothing: four imports, one of each kind."""
    graph = import_graph()
    assert "posttrain.errors" in graph["posttrain.irl.mdp"]  # at the top
    assert "posttrain.irl.feasibility" in graph["posttrain.irl"]  # by a package
    assert "posttrain.irl_runs.pictures" in graph["posttrain.irl_runs.run"]  # inside a function
    inside = {module for module in graph if ".inside." in module}
    assert any(inside & graph[module].keys() for module in inside)  # by a name without dots


def test_a_circle_is_shown_by_the_fewest_imports_that_lead_round_it() -> None:
    graph = {"a": {"b": 1, "d": 9}, "b": {"c": 3}, "c": {"a": 2}, "d": {}}
    assert list(circles(graph)) == ["a:1 -> b:3 -> c:2 -> a"]
