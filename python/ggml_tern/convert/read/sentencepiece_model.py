"""SentencePiece's file format, tokenizer.model: a protobuf message, as far as ternconv has to do with it.

The sentencepiece package brings the whole of it as generated code, but that code demands one particular
release of protobuf, and the package's own reader does not tell a user-defined token from an ordinary one. The
names, numbers and defaults below are those of sentencepiece_model.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

_Field = descriptor_pb2.FieldDescriptorProto

#: TrainerSpec.ModelType.
MODEL_KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
BPE = 2

#: message -> (field, number, type, default). A piece's type counts as gguf.TokenType does.
_MESSAGES: dict[str, tuple[tuple[str, int, int, str], ...]] = {
    "Piece": (
        ("piece", 1, _Field.TYPE_STRING, ""),
        ("score", 2, _Field.TYPE_FLOAT, ""),
        ("type", 3, _Field.TYPE_INT32, "1"),
    ),
    "TrainerSpec": (
        ("model_type", 3, _Field.TYPE_INT32, "1"),
        ("vocab_size", 4, _Field.TYPE_INT32, "8000"),
        ("byte_fallback", 35, _Field.TYPE_BOOL, "false"),
        ("unk_id", 40, _Field.TYPE_INT32, "0"),
        ("bos_id", 41, _Field.TYPE_INT32, "1"),
        ("eos_id", 42, _Field.TYPE_INT32, "2"),
        ("pad_id", 43, _Field.TYPE_INT32, "-1"),
        ("unk_piece", 45, _Field.TYPE_STRING, "<unk>"),
        ("bos_piece", 46, _Field.TYPE_STRING, "<s>"),
        ("eos_piece", 47, _Field.TYPE_STRING, "</s>"),
        ("pad_piece", 48, _Field.TYPE_STRING, "<pad>"),
    ),
    "NormalizerSpec": (
        ("name", 1, _Field.TYPE_STRING, ""),
        ("add_dummy_prefix", 3, _Field.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, _Field.TYPE_BOOL, "true"),
        ("escape_whitespaces", 5, _Field.TYPE_BOOL, "true"),
    ),
}


def _model_class() -> Any:
    package = "ggml_tern.sentencepiece"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            message.field.add(
                name=field,
                number=number,
                type=kind,
                label=_Field.LABEL_OPTIONAL,
                default_value=default or None,
            )
    model = file.message_type.add(name="Model")
    for field, number, name, label in (
        ("pieces", 1, "Piece", _Field.LABEL_REPEATED),
        ("trainer_spec", 2, "TrainerSpec", _Field.LABEL_OPTIONAL),
        ("normalizer_spec", 3, "NormalizerSpec", _Field.LABEL_OPTIONAL),
    ):
        model.field.add(
            name=field, number=number, type=_Field.TYPE_MESSAGE, label=label, type_name=f".{package}.{name}"
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Model"))


#: The message class: `Model.FromString(data)` reads, `SerializeToString()` writes.
Model = _model_class()
