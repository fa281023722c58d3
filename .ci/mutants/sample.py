"""Keep a sample of the mutants of a cosmic-ray session, the same one in every run, without equivalent ones."""

import ast
import hashlib
import itertools
import sys

from cosmic_ray.config import load_config
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db


def sample(items, size):
    """Return a mutant at each of ``size`` positions, with its line of code: those with the smallest hashes."""
    sites = {}
    for item in items:
        sites.setdefault((item.mutations[0].module_path, item.mutations[0].start_pos), []).append(item)
    code = {path: path.read_text() for path, _ in sites}
    order = sorted(sites, key=lambda s: digest(s[0], code[s[0]].splitlines()[s[1][0] - 1], s[1][1]))
    found = (mutants(sites[path, position], code[path], position) for path, position in order)
    return itertools.islice((some[0] for some in found if some), size)


def mutants(items, code, position):
    """Return the mutants of one position that change the code, each with its line, in the order of hashes."""
    tree, row = ast.parse(code), position[0] - 1
    types = [n for node in ast.walk(tree) for n in (getattr(node, "annotation", None), getattr(node, "returns", None))]
    if any((n.lineno, n.col_offset) <= position < (n.end_lineno, n.end_col_offset) for n in types if n):
        return []
    if code.splitlines()[row][position[1] :].startswith("*,"):
        return []  # keyword-only arguments follow; cosmic-ray takes the mark for a product
    found = []
    for item in items:
        (one,) = item.mutations
        mutant = mutate_code(code, get_operator(one.operator_name)(**one.operator_args), one.occurrence)
        try:
            if ast.dump(ast.parse(mutant)) != ast.dump(tree):
                found.append((item, f"{one.module_path}: {mutant.splitlines()[row].strip()}"))
        except SyntaxError:
            continue
    return sorted(found, key=lambda pair: digest(pair[1]))


def digest(*values):
    """Return a hash that is the same in every process."""
    return hashlib.sha256(repr([str(value) for value in values]).encode()).hexdigest()


if __name__ == "__main__":
    settings = load_config(sys.argv[1])["filters"]["sample"]
    equivalent = {line for line, _why in settings["equivalent"]}
    with use_db(sys.argv[2]) as session:
        chosen = [item for item, line in sample(session.work_items, settings["size"]) if line not in equivalent]
        session.clear()
        session.add_work_items(chosen)
