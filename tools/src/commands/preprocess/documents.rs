//! Splits input files into documents, and these into pieces of bounded size.
//!
//! JSON lines have the meaning of Megatron-LM's `tools/preprocess_data.py`.

use std::collections::VecDeque;
use std::fmt;
use std::io::{BufRead, Read};
use std::path::Path;
use std::sync::Arc;

use megatron::Error;
use megatron::data::{Part, Parts, SplitPoints};
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::input::{Format, Input};
use super::parquet::Rows;

/// Bytes of the longest line of JSON that is read; memory is bounded by a few of them.
pub const LONGEST_LINE: u64 = 64 << 20;

/// A part of a document, not yet parsed, so that workers share the parsing.
#[derive(Debug)]
pub struct Piece {
    path: Arc<Path>,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// A whole JSON document, with its line number from 1.
    Line(u64, Vec<u8>),
    Part(Part),
    /// A whole document: the texts of each key.
    Row(Vec<Vec<String>>),
}

impl Piece {
    /// Bytes of the input.
    pub fn len(&self) -> usize {
        match &self.content {
            Content::Line(_, bytes) => bytes.len(),
            Content::Part(part) => part.text.len(),
            Content::Row(texts) => texts.iter().flatten().map(String::len).sum(),
        }
    }

    /// The document ends with this piece.
    pub fn is_last(&self) -> bool {
        !matches!(&self.content, Content::Part(part) if !part.last)
    }

    /// As [`texts`](Self::texts), prepared for the tokenizer: each text of a line or a row is
    /// tokenized separately.
    ///
    /// # Errors
    /// Those of `texts`.
    pub fn parts(self, keys: &[String]) -> megatron::Result<Vec<Vec<Part>>> {
        match self.content {
            Content::Part(part) => Ok(vec![vec![part]; keys.len()]),
            _ => Ok(self
                .texts(keys)?
                .into_iter()
                .map(|texts| texts.into_iter().map(Part::whole).collect())
                .collect()),
        }
    }

    /// The texts of each of `keys`, the keys of [`Pieces`]; each text becomes a sequence. A part of
    /// a text file is the text of every key.
    ///
    /// # Errors
    /// `Error::Data` if a line is not a JSON object, or a key is missing or is not text.
    pub fn texts(self, keys: &[String]) -> megatron::Result<Vec<Vec<String>>> {
        match self.content {
            Content::Part(part) => Ok(vec![vec![part.text]; keys.len()]),
            Content::Row(texts) => Ok(texts),
            Content::Line(number, bytes) => {
                // Some editors start files with a byte-order mark.
                let bytes = if number == 1 {
                    bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes)
                } else {
                    &bytes
                };
                let mut deserializer = serde_json::Deserializer::from_slice(bytes);
                let parsed = Fields(keys).deserialize(&mut deserializer).and_then(|texts| {
                    deserializer.end()?;
                    Ok(texts)
                });
                parsed.map_err(|error| {
                    // The parser saw only this line, so its message says line 1.
                    let message = error.to_string();
                    let what = message.split(" at line 1 column").next().unwrap_or(&message);
                    let column = error.column();
                    let advice = match not_json(bytes, column) {
                        Some(name) => {
                            format!("; {name} is not JSON, although Python writes and reads it: write null instead")
                        }
                        None if what.contains("hex escape") || what.contains("surrogate") => {
                            "; half of a surrogate pair is not a character: leave it out, or write U+FFFD instead".into()
                        }
                        None => String::new(),
                    };
                    Error::data(&self.path, format!("line {number}, column {column}: {what}{advice}"))
                })
            }
        }
    }
}

/// The non-JSON number (such as NaN) that Python's `json` writes, if one is at `column` (from 1) of
/// a line, where the parser failed.
fn not_json(line: &[u8], column: usize) -> Option<&'static str> {
    let near = |name: &&str| {
        let start = column.saturating_sub(name.len() + 1);
        let end = line.len().min(column + name.len());
        line.get(start..end)
            .is_some_and(|part| part.windows(name.len()).any(|part| part == name.as_bytes()))
    };
    ["NaN", "Infinity"].into_iter().find(near)
}

/// The pieces of several files, in order.
pub struct Pieces {
    inputs: VecDeque<Input>,
    keys: Vec<String>,
    split_points: Arc<SplitPoints>,
    current: Option<(Arc<Path>, Reader)>,
}

enum Reader {
    Lines(Box<dyn BufRead + Send>, u64),
    Parts(Parts),
    Rows(Rows),
}

impl Pieces {
    /// The pieces of `inputs` for `keys`; text files are split where `split_points` allows it.
    pub fn new(
        inputs: impl IntoIterator<Item = Input>,
        keys: &[String],
        split_points: SplitPoints,
    ) -> Self {
        Self {
            inputs: inputs.into_iter().collect(),
            keys: keys.to_vec(),
            split_points: Arc::new(split_points),
            current: None,
        }
    }

    fn read(&mut self) -> megatron::Result<Option<Piece>> {
        loop {
            if let Some((path, reader)) = &mut self.current {
                let content = match reader {
                    Reader::Lines(lines, number) => next_line(lines, number, path)?,
                    Reader::Parts(parts) => parts.read()?.map(Content::Part),
                    Reader::Rows(rows) => rows.read()?.map(Content::Row),
                };
                if let Some(content) = content {
                    return Ok(Some(Piece { path: path.clone(), content }));
                }
            }
            let Some(input) = self.inputs.pop_front() else { return Ok(None) };
            let reader = match input.format {
                Format::JsonLines => Reader::Lines(input.open()?, 0),
                Format::Text => {
                    Reader::Parts(Parts::new(&input.path, input.open()?, self.split_points.clone()))
                }
                Format::Parquet => Reader::Rows(Rows::open(&input.path, &self.keys)?),
            };
            self.current = Some((input.path.into(), reader));
        }
    }
}

impl Iterator for Pieces {
    type Item = megatron::Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// The next line that is not blank.
fn next_line(
    lines: &mut dyn BufRead,
    number: &mut u64,
    path: &Path,
) -> megatron::Result<Option<Content>> {
    loop {
        *number += 1;
        let mut bytes = Vec::new();
        let read = lines.take(LONGEST_LINE + 1).read_until(b'\n', &mut bytes).map_err(|error| {
            match error.kind() {
                std::io::ErrorKind::InvalidData
                | std::io::ErrorKind::InvalidInput
                | std::io::ErrorKind::UnexpectedEof => Error::data(
                    path,
                    format!(
                        "line {number} cannot be decompressed: {error}; copy or create the file again"
                    ),
                ),
                _ => Error::io("read", path, error),
            }
        })?;
        if read == 0 {
            return Ok(None);
        }
        if bytes.len() as u64 > LONGEST_LINE {
            return Err(Error::data(
                path,
                format!(
                    "line {number} has more than {} MiB; a line is one document: split it into several",
                    LONGEST_LINE >> 20
                ),
            ));
        }
        if !bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Some(Content::Line(*number, bytes)));
        }
    }
}

/// The texts of some keys of a JSON object; other keys are skipped.
struct Fields<'a>(&'a [String]);

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = Vec<Vec<String>>;

    fn deserialize<D: serde::Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = Vec<Vec<String>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON object on each line")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut texts: Vec<Option<Vec<String>>> = vec![None; self.0.len()];
        let mut others = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            match self.0.iter().position(|wanted| *wanted == key) {
                // If a key is given twice, the last one counts, as in Python.
                Some(at) => texts[at] = Some(map.next_value_seed(Text(&key))?),
                None => {
                    map.next_value::<IgnoredAny>()?;
                    others.push(key);
                }
            }
        }
        let missing = texts.iter().position(Option::is_none);
        match missing {
            None => Ok(texts.into_iter().flatten().collect()),
            Some(at) => {
                others.truncate(8);
                let found = if others.is_empty() { "none".into() } else { others.join(", ") };
                Err(A::Error::custom(format!(
                    "there is no key \"{}\"; give --json-keys one of the existing keys: {found}",
                    self.0[at]
                )))
            }
        }
    }
}

/// A string or a list of strings, each a sequence; nothing if the value is null.
struct Text<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Text<'_> {
    type Value = Vec<String>;

    fn deserialize<D: serde::Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Text<'_> {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "a string or a list of strings under the key \"{}\"", self.0)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(vec![text.to_owned()])
    }

    fn visit_string<E: serde::de::Error>(self, text: String) -> Result<Self::Value, E> {
        Ok(vec![text])
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = list.next_element()? {
            texts.push(text);
        }
        Ok(texts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(line: &str, keys: &[&str]) -> Result<Vec<Vec<String>>, String> {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        let piece =
            Piece { path: Path::new("a.jsonl").into(), content: Content::Line(7, line.into()) };
        piece.texts(&keys).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_are_found_wherever_they_are_and_others_passed_over() {
        let line = r#"{"meta": {"text": "no", "n": [1, 2.5e3, null]}, "text": "a\n\u00e9\ud83d\ude00", "title": ["b", "c"]}"#;
        assert_eq!(texts(line, &["title", "text"]).unwrap(), [vec!["b", "c"], vec!["a\né😀"]]);
        assert_eq!(texts(r#"{"text": "a", "text": "b"}"#, &["text"]).unwrap(), [["b"]]);
        for nothing in ["[]", "null"] {
            assert_eq!(
                texts(&format!("{{\"text\": {nothing}}}"), &["text"]).unwrap(),
                [Vec::<String>::new()]
            );
        }
    }

    #[test]
    fn lines_that_are_no_documents_say_where_and_why() {
        for (line, parts) in [
            ("{\"text\": \"a\"", &["line 7, column 12", "EOF"][..]),
            ("[1]", &["line 7", "a JSON object on each line"]),
            (r#"{"text": 5}"#, &["line 7", "a list of strings under the key \"text\""]),
            (r#"{"text": ["a", 5]}"#, &["line 7", "expected a string"]),
            (r#"{"body": "a", "id": 1}"#, &["no key \"text\"", "body, id"]),
            (r#"{"text": "a"} {"text": "b"}"#, &["line 7", "trailing"]),
            (&format!("{{\"x\": {}", "[".repeat(1 << 20)), &["line 7", "EOF"]),
        ] {
            let message = texts(line, &["text"]).unwrap_err();
            assert!(
                parts.iter().all(|part| message.contains(part)),
                "{message} lacks one of {parts:?}"
            );
        }
        let piece = Piece {
            path: Path::new("a").into(),
            content: Content::Line(1, b"{\"text\": \"\xff\"}".to_vec()),
        };
        assert!(piece.texts(&["text".into()]).unwrap_err().to_string().contains("unicode"));
    }

    fn pieces(name: &str, content: impl AsRef<[u8]>) -> Vec<megatron::Result<Piece>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        Pieces::new([Input::new(&path).unwrap()], &["text".into()], SplitPoints::anywhere())
            .collect()
    }

    #[test]
    fn blank_lines_are_counted_but_are_no_documents() {
        let found = pieces("a.jsonl", "\n{\"a\": 1}\r\n  \n{\"text\": \"b\"}");
        let messages: Vec<_> = found
            .into_iter()
            .map(|piece| piece.unwrap().texts(&["text".into()]).map_err(|e| e.to_string()))
            .collect();
        assert_eq!(messages.len(), 2);
        assert!(
            messages[0].as_ref().unwrap_err().contains("line 2")
                && messages[1].as_ref().unwrap() == &[["b"]]
        );
    }

    #[test]
    fn a_line_too_long_for_memory_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bomb.jsonl.gz");
        let file = std::fs::File::create(&path).unwrap();
        let mut encoder = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
        std::io::copy(&mut std::io::repeat(b'a').take(LONGEST_LINE + 5), &mut encoder).unwrap();
        encoder.finish().unwrap();
        let found: Vec<_> =
            Pieces::new([Input::new(&path).unwrap()], &["text".into()], SplitPoints::anywhere())
                .take(2)
                .collect();
        let message = found[0].as_ref().unwrap_err().to_string();
        assert!(message.contains("line 1 has more than 64 MiB"), "{message}");
    }

    /// 5 MiB without a line break are read in pieces that end between words and lose nothing.
    #[test]
    fn text_without_lines_is_read_in_pieces() {
        let text = "wörd ".repeat(900_000);
        let found: Vec<Piece> = pieces("a.txt", &text).into_iter().map(Result::unwrap).collect();
        assert!(found.len() >= 5 && found.iter().all(|piece| piece.len() < 2 << 20));
        assert!(
            found[..found.len() - 1].iter().all(|piece| !piece.is_last())
                && found[found.len() - 1].is_last()
        );
        let whole: String = found
            .into_iter()
            .flat_map(|piece| piece.texts(&["text".into()]).unwrap().remove(0))
            .collect();
        assert_eq!(whole, text);
        let dense: Vec<Piece> =
            pieces("a.txt", "é".repeat(2_000_001)).into_iter().map(Result::unwrap).collect();
        assert!(dense.len() >= 3 && dense.iter().map(Piece::len).sum::<usize>() == 4_000_002);
    }

    #[test]
    fn text_that_is_not_utf_8_is_refused() {
        let found = pieces("a.txt", b"good\n\nbad \xff\n");
        assert!(found.last().unwrap().as_ref().unwrap_err().to_string().contains("not UTF-8"));
    }
}
