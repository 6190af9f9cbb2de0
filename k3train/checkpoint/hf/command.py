"""What ``k3train convert`` does and says."""

from __future__ import annotations

from argparse import Namespace

from k3train.checkpoint.hf.exporting import export_release
from k3train.checkpoint.hf.importing import import_release
from k3train.checkpoint.hf.names import Layout
from k3train.config.schema import Precision


def export(options: Namespace) -> str:
    """Export as the command line says; returns what to print."""
    done = export_release(
        options.source,
        options.out,
        layout=Layout[options.layout],
        precision=Precision[options.precision],
        like_release=options.like_release,
        vision_from=options.vision_from,
        shard_bytes=int(options.shard_gb * 10**9),
    )
    lines = [f"{options.out}: {done.tensors:,} tensors, {done.size_bytes:,} bytes, from {done.checkpoint}"]
    if done.own_settings:
        lines.append('settings that only k3train reads, under "k3train" in config.json:')
        lines += [f"  model.{key} = {value}" for key, value in done.own_settings.items()]
    return "\n".join(lines)


def bring_in(options: Namespace) -> str:
    """Import as the command line says; returns what to print."""
    precision = Precision[options.precision] if options.precision else None
    config = import_release(options.source, options.out, text_only=options.text_only, precision=precision)
    lines = [
        f"{options.out}: start a run from it with checkpoint.load_from={options.out}",
        f"{options.out / 'model.yaml'}: its model group; copy it into configs/model/",
    ]
    if config.tied:
        lines.append(
            "the release ties head and embedding; here the head starts as a copy and trains by itself"
        )
    if config.unused:
        lines.append(f"keys of config.json that nothing here reads: {', '.join(config.unused)}")
    return "\n".join(lines)
