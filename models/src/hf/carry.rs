//! Sidecar files of the weights, next to checkpoints. They are copied from a Hugging Face folder,
//! and to another folder when a run saves elsewhere.

use std::path::{Path, PathBuf};

use megatron::Result;
use megatron::checkpoint::{self, SidecarFiles};

use super::config::CONFIG;
use super::{GENERATION_CONFIG, ORIGIN_CONFIG, SIDECAR_FILES};

/// Source and destination of the sidecar files: the generation settings; the model's configuration,
/// whose name in the source is `config`; and, with `with_tokenizer`, the tokenizer files. Set it if
/// they belong to the run's tokenizer.
pub(super) fn sidecars(
    (from, config): (&Path, &'static str),
    to: &Path,
    with_tokenizer: bool,
) -> impl Iterator<Item = (PathBuf, PathBuf)> {
    let names =
        SIDECAR_FILES.into_iter().filter(move |name| with_tokenizer || *name == GENERATION_CONFIG);
    let pairs = names.map(|name| (name, name)).chain([(config, ORIGIN_CONFIG)]);
    pairs.map(|(name, there)| (from.join(name), to.join(there)))
}

/// Copies those of `pairs` whose destination does not exist.
fn place_absent(pairs: impl Iterator<Item = (PathBuf, PathBuf)>) -> Result<()> {
    SidecarFiles::read(pairs.filter(|(_, to)| !to.exists()))?.place()
}

/// Copies the tokenizer files in `folder`, which the run's tokenizer was opened from, next to the
/// checkpoints in `checkpoints`. If the run has no model folder (`alone`), also copies the
/// generation settings. If there are already checkpoints, existing files stay.
///
/// # Errors
/// As [`copy_sidecar_files`].
pub fn copy_tokenizer(folder: &Path, checkpoints: &Path, alone: bool) -> Result<()> {
    let names = SIDECAR_FILES.into_iter().filter(|name| alone || *name != GENERATION_CONFIG);
    place(names.map(|name| (folder.join(name), checkpoints.join(name))), checkpoints)
}

/// Copies the sidecar files of the Hugging Face model in `folder` next to the checkpoints in
/// `checkpoints`. Tokenizer files are copied only if they belong to the run's tokenizer
/// (`with_tokenizer`). If there are already checkpoints, as for a resumed run, existing files stay.
///
/// # Errors
/// If there is no checkpoint yet and another file is in the place of a sidecar file, or if the
/// system refuses. Nothing is replaced.
pub fn copy_sidecar_files(folder: &Path, checkpoints: &Path, with_tokenizer: bool) -> Result<()> {
    place(sidecars((folder, CONFIG), checkpoints, with_tokenizer), checkpoints)
}

fn place(pairs: impl Iterator<Item = (PathBuf, PathBuf)>, checkpoints: &Path) -> Result<()> {
    if checkpoint::holds_any(checkpoints)? {
        return place_absent(pairs);
    }
    let sidecars = SidecarFiles::read(pairs)?;
    sidecars.refuse_to_replace()?;
    sidecars.place()
}

/// Copies the sidecar files of the checkpoints in `from` that are missing next to those in `to`.
/// Tokenizer files are copied only if they belong to the run's tokenizer (`with_tokenizer`).
///
/// # Errors
/// If the system refuses. Each file appears whole or not at all.
pub fn carry_sidecar_files(from: &Path, to: &Path, with_tokenizer: bool) -> Result<()> {
    place_absent(sidecars((from, ORIGIN_CONFIG), to, with_tokenizer))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_is_absent_is_carried_along_and_what_is_there_stays() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let read = |name: &str| fs::read_to_string(to.path().join(name)).ok();
        for name in [ORIGIN_CONFIG, GENERATION_CONFIG, "tokenizer.json", "chat_template.jinja"] {
            fs::write(from.path().join(name), "theirs").unwrap();
        }
        fs::write(to.path().join(GENERATION_CONFIG), "ours").unwrap();
        carry_sidecar_files(from.path(), to.path(), false).unwrap();
        assert_eq!(read(ORIGIN_CONFIG).as_deref(), Some("theirs"));
        assert_eq!(read(GENERATION_CONFIG).as_deref(), Some("ours"));
        // Files of a tokenizer other than the run's would mislead.
        assert_eq!((read("tokenizer.json"), read("chat_template.jinja")), (None, None));
        carry_sidecar_files(from.path(), &to.path().join("new"), true).unwrap();
        assert_eq!(read("new/tokenizer.json").as_deref(), Some("theirs"));
        assert_eq!(fs::read_dir(to.path().join("new")).unwrap().count(), 4);
    }
}
