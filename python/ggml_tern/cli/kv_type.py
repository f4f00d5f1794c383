"""The option ``--kv`` of the commands that have a KV cache."""

from __future__ import annotations

import click

#: The names of plan.arithmetic.KV_TYPES, which would cost an import here.
KV_TYPE = click.Choice(["f16", "q8_0", "q5_0", "q4_0"])
