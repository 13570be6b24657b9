//! Folders of Megatron-LM's checkpoints: selects the checkpoint, and checks whether its format is
//! supported.

use std::fs;
use std::path::{Path, PathBuf};

use megatron::{Error, Result, files};
use serde::Deserialize;

use super::storage::METADATA;

/// The file that names a checkpoint's format: `megatron/core/dist_checkpointing/core.py`.
const FORMAT: &str = "metadata.json";
const POINTER: &str = "latest_checkpointed_iteration.txt";
const LEGACY: &str = "mp_rank_";
/// The file of this program's own checkpoints.
const MANIFEST: &str = "manifest.json";
const MAX_SMALL_BYTES: u64 = 1 << 16;
const CONVERT: &str = "convert it with Megatron-LM: load it there with --load, \
    --ckpt-convert-format torch_dist and --ckpt-convert-save DIR";

/// Whether `folder` looks like a Megatron-LM checkpoint, or a folder of them, in any format.
pub fn is_megatron(folder: &Path) -> bool {
    [METADATA, FORMAT, POINTER].iter().any(|name| folder.join(name).exists()) || has_legacy(folder)
}

/// The folder of the checkpoint in `folder`: `folder` itself, or the one that its pointer file
/// names.
///
/// # Errors
/// If there is no checkpoint, or its format is not `torch_dist`; the message says what to do.
pub(super) fn checkpoint_folder(folder: &Path) -> Result<PathBuf> {
    let pointer = folder.join(POINTER);
    let path = if pointer.exists() && !folder.join(METADATA).exists() {
        let text = small_file(&pointer)?;
        let name = match text.trim().parse::<u64>() {
            Ok(iteration) => format!("iter_{iteration:07}"),
            Err(_) if text.trim() == "release" => "release".into(),
            Err(_) => {
                return Err(Error::checkpoint(
                    &pointer,
                    "names neither an iteration nor `release`",
                ));
            }
        };
        folder.join(name)
    } else {
        folder.to_path_buf()
    };
    let refuse = |why: String| Err(Error::checkpoint(&path, why));
    if path.join(MANIFEST).exists() {
        return refuse("is a checkpoint of this program, and needs no import; --load it".into());
    }
    if has_legacy(&path) {
        return refuse(format!(
            "has Megatron-LM's format torch (mp_rank_…/model_optim_rng.pt), which is not supported; {CONVERT}"
        ));
    }
    if !path.join(FORMAT).exists() {
        let what = if path.join(METADATA).exists() {
            "torch_dcp or fsdp_dtensor"
        } else {
            "an unknown format"
        };
        return refuse(format!(
            "has no {FORMAT}: it is in {what}, but only torch_dist is supported; {CONVERT}"
        ));
    }
    let format: Format = serde_json::from_str(&small_file(&path.join(FORMAT))?).map_err(|e| {
        Error::checkpoint(
            path.join(FORMAT),
            format!("does not record the format of the checkpoint: {e}"),
        )
    })?;
    match format.sharded_backend.as_str() {
        "torch_dist" => Ok(path),
        other => {
            refuse(format!("has the format {other}, but only torch_dist is supported; {CONVERT}"))
        }
    }
}

#[derive(Deserialize)]
struct Format {
    sharded_backend: String,
}

fn has_legacy(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().starts_with(LEGACY))
}

fn small_file(path: &Path) -> Result<String> {
    files::read_text(path, MAX_SMALL_BYTES).map_err(|e| Error::io("read", path, e))
}
