# SPDX-License-Identifier: Apache-2.0
"""Folders that `mizzen engine` cannot serve: the message names the problem and what to give instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from mizzen.server.model_files import ModelFolderError, check_has_config, check_is_folder

ADVICE = "give a folder with config.json, the tokenizer and safetensors"


def test_a_path_that_is_no_folder_is_rejected_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "nothing"):
        with pytest.raises(ModelFolderError) as error:
            check_is_folder(path)
        assert f"--model {path} is not a folder" in str(error.value) and ADVICE in str(error.value)


def test_a_folder_without_config_is_rejected_and_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError) as error:
        check_has_config(tmp_path)
    assert str(error.value) == f"--model {tmp_path} has no config.json; {ADVICE}"
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelFolderError) as error:
        check_has_config(tmp_path)
    assert str(error.value).startswith("--model: ") and "GGUF format, which is not supported" in str(
        error.value
    )
    (tmp_path / "config.json").touch()
    check_has_config(tmp_path)
