"""``memfit demo --layers``: every strategy on a built-in list of layers, without torch."""

from __future__ import annotations

from pathlib import Path

from memfit.cli.output import console, make_folder, print_json
from memfit.cli.strategy_text import parse_strategy
from memfit.layers.checkpoint_plan import build_checkpoint_plan
from memfit.layers.examples import gpt_layers
from memfit.layers.layer_files import plan_document, save_layer_plan, save_layers
from memfit.layers.strategies import Budget

_BUDGET = "budget 1.5GiB"
_STRATEGIES = ("none", "every-nth:2", "selective:0.5", "largest:4", "attention", "ffn", "sqrt", "full")


def show_layers_demo(out: Path | None, *, as_json: bool) -> None:
    """Plan the layers of a GPT-2 with every strategy, and compare what each one saves and costs."""
    layers = gpt_layers()
    strategies = {text: parse_strategy(text) for text in _STRATEGIES} | {_BUDGET: Budget(1536)}
    plans = {label: build_checkpoint_plan(layers, strategy) for label, strategy in strategies.items()}
    if out is not None:
        make_folder(out)
        save_layers(layers, out / "layers.json")
        save_layer_plan(plans[_BUDGET], out / "plan.json", strategy=_BUDGET)
    if as_json:
        print_json({"plans": [plan_document(plan, strategy=label) for label, plan in plans.items()]})
        return
    from memfit.report.layer_table import comparison_in_words, strategy_table

    screen = console()
    screen.print(strategy_table(layers, plans, title="GPT-2 small, 8 sequences of 1024 tokens, 16 bits"))
    screen.print(comparison_in_words(layers, plans, chosen=_BUDGET))
    if out is not None:
        screen.print(f"Wrote {out / 'layers.json'} and {out / 'plan.json'}.", markup=False, soft_wrap=True)
