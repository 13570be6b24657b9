//! Files that go along with weights, beside checkpoints: from a Hugging Face folder, and from there
//! when a run saves elsewhere.

use std::path::{Path, PathBuf};

use megatron::Result;
use megatron::checkpoint::{self, SidecarFiles};

use super::config::CONFIG;
use super::{GENERATION_CONFIG, ORIGIN_CONFIG, SIDECAR_FILES};

/// Where what goes along comes from and goes to: settings of generation, the model's configuration,
/// which is called `config` there, and, if they are of the run's tokenizer (`with_tokenizer`), the
/// files about tokens.
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

/// Puts those of `pairs` in their places whose place is empty.
fn place_absent(pairs: impl Iterator<Item = (PathBuf, PathBuf)>) -> Result<()> {
    SidecarFiles::read(pairs.filter(|(_, to)| !to.exists()))?.place()
}

/// Copies the files about tokens in `folder`, which the run's tokenizer was opened in, beside the
/// checkpoints in `checkpoints`, and if the run has no model's folder (`alone`), the settings of
/// generation. Beside checkpoints that are there already files that are there stay.
///
/// # Errors
/// As [`copy_sidecar_files`].
pub fn copy_tokenizer(folder: &Path, checkpoints: &Path, alone: bool) -> Result<()> {
    let names = SIDECAR_FILES.into_iter().filter(|name| alone || *name != GENERATION_CONFIG);
    place(names.map(|name| (folder.join(name), checkpoints.join(name))), checkpoints)
}

/// Copies what goes along with the Hugging Face model in `folder` beside the checkpoints in
/// `checkpoints`, the files about tokens if they are of the run's tokenizer (`with_tokenizer`).
/// Beside checkpoints that are there already, so of a run that goes on, files that are there stay.
///
/// # Errors
/// If there is no checkpoint yet and another file is where one goes, or the system refuses. Nothing
/// is replaced.
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

/// Copies what lies beside the checkpoints in `from` and is not there yet beside those in `to`, the
/// files about tokens if they are of the run's tokenizer (`with_tokenizer`).
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
        // Those of another tokenizer than the run's would mislead.
        assert_eq!((read("tokenizer.json"), read("chat_template.jinja")), (None, None));
        carry_sidecar_files(from.path(), &to.path().join("new"), true).unwrap();
        assert_eq!(read("new/tokenizer.json").as_deref(), Some("theirs"));
        assert_eq!(fs::read_dir(to.path().join("new")).unwrap().count(), 4);
    }
}
