//! What an import kept beside checkpoints goes along when a run saves elsewhere.

use std::path::Path;

use megatron::Result;
use megatron::checkpoint::Companions;

use super::{COMPANIONS, GENERATION_CONFIG, ORIGIN_CONFIG};

/// Copies what lies beside the checkpoints in `from` and is not there yet beside those in `to`: the `config.json` of the model that
/// they were imported from and its settings of generation, and, if it is the run's tokenizer (`with_tokenizer`), the files about tokens.
///
/// # Errors
/// If the system refuses. Each file appears whole or not at all.
pub fn carry_companions(from: &Path, to: &Path, with_tokenizer: bool) -> Result<()> {
    let about_tokens = COMPANIONS.into_iter().filter(|name| with_tokenizer && *name != GENERATION_CONFIG);
    let pairs = about_tokens.chain([GENERATION_CONFIG, ORIGIN_CONFIG]).map(|name| (from.join(name), to.join(name)));
    Companions::read(pairs.filter(|(_, to)| !to.exists()))?.place()
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
        carry_companions(from.path(), to.path(), false).unwrap();
        assert_eq!(read(ORIGIN_CONFIG).as_deref(), Some("theirs"));
        assert_eq!(read(GENERATION_CONFIG).as_deref(), Some("ours"));
        // Those of another tokenizer than the run's would mislead.
        assert_eq!((read("tokenizer.json"), read("chat_template.jinja")), (None, None));
        carry_companions(from.path(), &to.path().join("new"), true).unwrap();
        assert_eq!(read("new/tokenizer.json").as_deref(), Some("theirs"));
        assert_eq!(fs::read_dir(to.path().join("new")).unwrap().count(), 4);
    }
}
