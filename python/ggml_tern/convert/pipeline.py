"""The stages in a row: checkpoint, architecture, vocabulary, quantization, file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from yaml import YAMLError  # type: ignore[import-untyped]

from ggml_tern.convert.architectures import Role, find_architecture
from ggml_tern.convert.checkpoint import Checkpoint
from ggml_tern.convert.sources import find_sources
from ggml_tern.convert.ternarize import (
    PQ2_0,
    PTQ1_0,
    Q2_0,
    Q8_0,
    Stats,
    Target,
    TypeChoice,
    choose_target,
    encode,
)
from ggml_tern.convert.vocab import read_vocab
from ggml_tern.convert.writer import OutputFile, check_output
from ggml_tern.errors import TernError

#: general.file_type of a file whose matrices are mostly of that type. 141 and 143 are what the released PQ2_0
#: and PTQ1_0 models carry; gguf-py has no names for them, nor (in older releases) for 41.
_FILE_TYPES = {
    Q8_0.id: int(gguf.LlamaFileType.MOSTLY_Q8_0),
    Q2_0.id: 41,
    PQ2_0.id: 141,
    PTQ1_0.id: 143,
}


@dataclass
class Report:
    """What a conversion made.

    Attributes:
        output: the file, `size` bytes long.
        targets: its tensors in file order, with what quantizing each cost in `stats`.
        notes: one line for each thing that the user should know.
    """

    output: Path
    targets: list[Target] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    size: int = 0


def convert(
    model_dir: Path,
    output: Path,
    choice: TypeChoice,
    *,
    force: bool = False,
    n_threads: int = 0,
    start: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> Report:
    """Convert the Hugging Face model in `model_dir` to the GGUF file `output`.

    Args:
        choice: the types of the matrices, the embedding and the head.
        force: replace an existing output.
        n_threads: threads that quantize; 0 for one per core.
        start, advance: told the number of bytes of tensor data, first in total and then as they are written.

    Raises TernError for anything that the user can mend; the output then does not exist, or is what it was.
    """
    checkpoint = Checkpoint(model_dir)
    check_output(output, checkpoint.files(), force)
    architecture = find_architecture(checkpoint)
    if architecture.tied and choice.head is not None:
        raise TernError(
            f"{model_dir}: its head is its embedding, so --head has no effect; give the type with --embed"
        )
    specs = list(architecture.tensors())
    sources = find_sources(checkpoint, architecture, specs)
    vocab = read_vocab(model_dir, architecture.vocab_size)
    targets = [choose_target(spec, choice) for spec in specs]
    report = Report(output, targets, notes=vocab.notes)

    n_threads = n_threads or len(os.sched_getaffinity(0))
    with OutputFile(output, architecture.model_arch) as file:
        _add_general_metadata(file.metadata, model_dir, targets)
        architecture.add_metadata(file.metadata)
        vocab.add_to(file.metadata)
        file.write_header(targets)
        start(sum(target.nbytes for target in targets))
        with ThreadPoolExecutor(n_threads, thread_name_prefix="quantize") as pool:
            for target in targets:
                pieces = encode(target, sources[target.spec.name], pool, n_threads)
                try:
                    stats = file.write_tensor(target, pieces, advance)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
                report.stats.append(stats)
        report.size = file.commit()
    return report


def _add_general_metadata(writer: gguf.GGUFWriter, model_dir: Path, targets: Sequence[Target]) -> None:
    """The general.* keys: name, licence and so on from the model card and the directory; size, file type."""
    n_weights = sum(int(np.prod(target.spec.shape, dtype=np.int64)) for target in targets)
    try:
        metadata = gguf.Metadata.load(model_path=model_dir.resolve(), total_params=n_weights)
    except (YAMLError, ValueError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise TernError(
            f"{model_dir / 'README.md'}: the front matter cannot be read ({reason}); mend or remove the file"
        ) from None
    if metadata.name is None:
        metadata.name = model_dir.resolve().name
    if metadata.size_label is None:
        metadata.size_label = gguf.size_label(n_weights, n_weights, 0, 0)
    writer.add_type(gguf.GGUFType.MODEL)
    metadata.set_gguf_meta_model(writer)
    weight_of: Counter[int] = Counter()
    for target in targets:
        if target.spec.role is Role.MATRIX:
            weight_of[target.type.id] += int(np.prod(target.spec.shape, dtype=np.int64))
    commonest = weight_of.most_common(1)[0][0]
    writer.add_file_type(_FILE_TYPES.get(commonest, int(gguf.LlamaFileType.MOSTLY_F16)))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
