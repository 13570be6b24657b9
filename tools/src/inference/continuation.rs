//! Decodes the continuation of a prompt.
//!
//! Tokens cannot be decoded one by one: a character can span several tokens, and sentencepiece
//! decoders drop the leading space of a text. The prompt's tokens are therefore always decoded too.

use megatron::data::Tokenizer;
use megatron::train::Length;

use crate::error::Result;
use crate::report::count;

/// Tokens that follow a prompt, and the text that was already returned.
pub struct Continuation<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the prompt and those after it.
    tokens: Vec<u32>,
    /// The text of all tokens at the last call.
    told: String,
}

impl<'a> Continuation<'a> {
    /// A continuation with only its prompt.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the prompt.
    pub fn of(tokenizer: &'a Tokenizer, prompt: &[u32]) -> Result<Self> {
        Ok(Self { tokenizer, tokens: prompt.to_vec(), told: tokenizer.decode(prompt)? })
    }

    /// The text that `token` adds, without a character that is still incomplete.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn add(&mut self, token: u32) -> Result<String> {
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens)?;
        Ok(if text.ends_with(char::REPLACEMENT_CHARACTER) {
            String::new()
        } else {
            self.tell(text)
        })
    }

    /// The text that was held back.
    ///
    /// # Errors
    /// If the tokenizer's decoder fails.
    pub fn rest(mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.tokens)?;
        Ok(self.tell(text))
    }

    /// The end of `text` from where it differs from the text already returned; the prompt's last
    /// character may have been incomplete.
    fn tell(&mut self, text: String) -> String {
        let same = text
            .chars()
            .zip(self.told.chars())
            .take_while(|(a, b)| a == b)
            .map(|(a, _)| a.len_utf8())
            .sum();
        let new = text[same..].to_string();
        self.told = text;
        new
    }
}

/// The text of the tokens `new` after those of `prompt`.
///
/// # Errors
/// If the tokenizer's decoder fails.
pub fn continued(tokenizer: &Tokenizer, prompt: &[u32], new: &[u32]) -> Result<String> {
    let mut continuation = Continuation::of(tokenizer, prompt)?;
    continuation.tokens.extend(new);
    continuation.rest()
}

/// The note for a continuation of `new` tokens that fills the model's positions before it reaches
/// the requested length.
pub fn cut_short(prompt: usize, new: usize, length: &Length) -> Option<String> {
    (new < length.tokens && prompt + new >= length.window).then(|| {
        format!(
            "note: the continuation ends after {} of {}: with the prompt's {prompt} they fill the model's {} positions",
            count(new as u64, "token"),
            length.tokens,
            length.window
        )
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A vocabulary like Llama 2's: words begin with ▁, other characters are bytes, and the first
    /// space is not text.
    fn sentencepiece(folder: &Path) -> Tokenizer {
        let vocab =
            r#"{"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁once": 3, "▁upon": 4, "▁a": 5, ",": 6}"#;
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [],
                "normalizer": {{"type": "Sequence", "normalizers": [
                    {{"type": "Prepend", "prepend": "▁"}}, {{"type": "Replace", "pattern": {{"String": " "}}, "content": "▁"}}]}},
                "pre_tokenizer": null, "post_processor": null,
                "decoder": {{"type": "Sequence", "decoders": [
                    {{"type": "Replace", "pattern": {{"String": "▁"}}, "content": " "}}, {{"type": "ByteFallback"}},
                    {{"type": "Fuse"}}, {{"type": "Strip", "content": " ", "start": 1, "stop": 0}}]}},
                "model": {{"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": {vocab}, "merges": []}}}}"#
        );
        let path = folder.join("tokenizer.json");
        std::fs::write(&path, json).unwrap();
        Tokenizer::open(path.to_str().unwrap(), None, Path::new("")).unwrap()
    }

    #[test]
    fn the_space_behind_a_prompt_is_part_of_its_continuation() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = sentencepiece(folder.path());
        assert_eq!(tokenizer.decode(&[4, 5]).unwrap(), "upon a", "a text's first space is dropped");
        assert_eq!(continued(&tokenizer, &[3], &[4, 5, 6]).unwrap(), " upon a,");
        let mut streamed = Continuation::of(&tokenizer, &[3]).unwrap();
        assert_eq!([4, 5, 6].map(|token| streamed.add(token).unwrap()), [" upon", " a", ","]);
        assert_eq!(streamed.rest().unwrap(), "");
    }

    /// A model's vocabulary may be larger than its tokenizer's.
    #[test]
    fn ids_that_are_no_tokens_have_no_text() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = sentencepiece(folder.path());
        let mut streamed = Continuation::of(&tokenizer, &[3, 99]).unwrap();
        assert_eq!(
            [4, 7, 1 << 30, 5].map(|token| streamed.add(token).unwrap()),
            [" upon", "", "", " a"]
        );
        assert_eq!(continued(&tokenizer, &[3], &[100, 4]).unwrap(), " upon");
    }

    #[test]
    fn a_character_is_told_once_all_its_bytes_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = sentencepiece(folder.path());
        let mut streamed = Continuation::of(&tokenizer, &[3]).unwrap();
        let told = [4, 1, 2, 5, 1].map(|token| streamed.add(token).unwrap());
        assert_eq!(told, [" upon", "", "é", " a", ""]);
        assert_eq!(streamed.rest().unwrap(), "\u{FFFD}");
        // A prompt's tokens may end within a character; a prompt may also end with a replacement
        // character.
        assert_eq!(continued(&tokenizer, &[3, 1], &[2, 4]).unwrap(), "é upon");
        assert_eq!(continued(&Tokenizer::byte(), &[0x61, 0xef, 0xbf, 0xbd], &[0x62]).unwrap(), "b");
    }
}
