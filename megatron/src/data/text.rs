//! Text on disk: the files that are documents, and their paragraphs.
//!
//! A file is a document. Its paragraphs become the sequences of the dataset, as closely as its
//! tokens can be split there, so that splits, which count sequences as Megatron's do, are finer
//! than files. A paragraph ends after the blank lines that follow it; the concatenated paragraphs
//! are the file.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::cache::KeyHasher;
use super::parts::{Part, Parts};
use super::split_points::SplitPoints;
use crate::{Error, Result};

/// Extensions that count as text within folders: prose, then code, then settings. A file that is
/// named directly may have any extension except those of records (JSON lines). JSON, CSV and logs
/// are left out because they are mostly data, and a run must not read what it writes.
pub const TEXT_EXTENSIONS: &[&str] = &[
    "txt", "text", "md", "markdown", "rst", "adoc", "org", "tex", //
    "rs", "py", "c", "h", "cc", "cpp", "hpp", "cu", "cuh", "go", "java", "kt", "swift", "js",
    "jsx", "ts", "tsx", "rb", "php", "lua", "sh", "sql", "jl", "hs", "ml", "scala", "r", //
    "toml", "yaml", "yml",
];

/// Extensions of files that hold text as records, one JSON object per line.
const NO_TEXT_EXTENSIONS: &[&str] = &["jsonl", "ndjson"];

/// Subfolders that are always skipped.
const SKIPPED_FOLDERS: &[&str] = &["target", "node_modules", "__pycache__"];
/// A folder with this file holds checkpoints, not text.
const CHECKPOINT_MARK: &str = "latest_checkpointed_iteration.txt";
/// Bytes after which a paragraph ends at the next line break, so that text without blank lines can
/// be split too.
const LONGEST_PARAGRAPH: usize = 1 << 16;
/// Bytes of one line after which a paragraph ends between two words, so that text without line
/// breaks is not read as a whole.
const LONGEST_LINE: u64 = 1 << 20;

/// The documents of a run, and a key of their content.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// The path that errors name: the first one given.
    path: PathBuf,
    files: Vec<PathBuf>,
    num_bytes: u64,
    key: String,
}

impl Corpus {
    /// Finds the text under `paths` (files, or folders, read recursively in the order of names) and
    /// reads it once.
    ///
    /// Skipped within folders: hidden files and folders, `target`, `node_modules`, `__pycache__`,
    /// checkpoints, the folder `except` (the cache), other extensions than [`TEXT_EXTENSIONS`], and
    /// files that are empty, hold NUL or are not UTF-8.
    ///
    /// # Errors
    /// `Error::Data` if a path is missing, a directly named file is empty or not text, or a folder
    /// holds no text.
    pub fn scan(paths: &[PathBuf], except: &Path) -> Result<Self> {
        let except = fs::canonicalize(except).ok();
        let path = paths.first().cloned().unwrap_or_default();
        let mut corpus = Self { path, files: Vec::new(), num_bytes: 0, key: String::new() };
        let mut hasher = KeyHasher::default();
        for path in paths {
            let meta = fs::metadata(path).map_err(|error| Error::io("open", path, error))?;
            if !meta.is_dir() && !meta.is_file() {
                return Err(Error::data(
                    path,
                    "is neither a file nor a folder; give text files or folders of text",
                ));
            }
            if meta.is_file() {
                let extension =
                    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
                if NO_TEXT_EXTENSIONS.contains(&extension.to_lowercase().as_str()) {
                    return Err(Error::data(
                        path,
                        "holds records, not text: a run would train on their syntax; convert one \
                         of their keys to a dataset with `megatron preprocess`, and give its \
                         prefix",
                    ));
                }
                match read_text(path, &mut hasher)? {
                    Content::Text(bytes) => corpus.add(path.clone(), bytes),
                    Content::Empty => {
                        return Err(Error::data(path, "is empty; give a file with text"));
                    }
                    Content::Binary(why) => {
                        return Err(Error::data(
                            path,
                            format!("is not text: {why}; give UTF-8 text"),
                        ));
                    }
                }
                continue;
            }
            let mut walk =
                Walk { except: except.as_deref(), visited: BTreeSet::new(), files: Vec::new() };
            walk.folder(path)?;
            let before = corpus.files.len();
            for file in walk.files {
                if let Content::Text(bytes) = read_text(&file, &mut hasher)? {
                    corpus.add(file, bytes);
                }
            }
            if corpus.files.len() == before {
                return Err(Error::data(
                    path,
                    format!(
                        "holds no text; files with these endings are read: {}; hidden and binary files are not",
                        TEXT_EXTENSIONS.join(" ")
                    ),
                ));
            }
        }
        corpus.key = hasher.finish();
        Ok(corpus)
    }

    fn add(&mut self, file: PathBuf, bytes: u64) {
        self.files.push(file);
        self.num_bytes += bytes;
    }

    /// The documents, in order.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Bytes of text.
    pub fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    /// A hash of the content only.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Every part of every document, in order; an error at the end if the text changed since the
    /// scan.
    pub fn parts(&self, split_points: Arc<SplitPoints>) -> CorpusParts<'_> {
        CorpusParts {
            corpus: self,
            split_points,
            next_file: 0,
            current: None,
            hasher: KeyHasher::default(),
            length: 0,
            ended: false,
        }
    }
}

/// Iterator over the parts of a corpus.
pub struct CorpusParts<'a> {
    corpus: &'a Corpus,
    split_points: Arc<SplitPoints>,
    next_file: usize,
    current: Option<Parts>,
    hasher: KeyHasher,
    /// Bytes of the current document so far.
    length: u64,
    ended: bool,
}

impl CorpusParts<'_> {
    fn read(&mut self) -> Result<Option<Part>> {
        loop {
            if let Some(current) = &mut self.current
                && let Some(part) = current.read()?
            {
                self.hasher.update(part.text.as_bytes());
                self.length += part.text.len() as u64;
                if part.last {
                    end_file(&mut self.hasher, std::mem::take(&mut self.length));
                }
                return Ok(Some(part));
            }
            let Some(file) = self.corpus.files.get(self.next_file) else { break };
            self.next_file += 1;
            self.current = Some(Parts::of(Paragraphs::open(file)?, self.split_points.clone()));
        }
        if std::mem::take(&mut self.hasher).finish() != self.corpus.key {
            return Err(changed(&self.corpus.path));
        }
        Ok(None)
    }
}

impl Iterator for CorpusParts<'_> {
    type Item = Result<Part>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.read();
        self.ended = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

/// A part of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paragraph {
    /// Includes the blank lines after it: the concatenated texts are the document.
    pub text: String,
    /// The document ends here.
    pub last: bool,
}

/// The paragraphs of one document, read on demand.
pub struct Paragraphs {
    path: PathBuf,
    reader: Box<dyn BufRead + Send>,
    /// First line of the next paragraph.
    ahead: Vec<u8>,
    /// The error for bytes that are not UTF-8.
    no_text: fn(&Path) -> Error,
}

impl Paragraphs {
    fn open(path: &Path) -> Result<Self> {
        let file = crate::files::open(path).map_err(|error| Error::io("open", path, error))?;
        let reader = BufReader::with_capacity(1 << 18, file);
        Ok(Self {
            path: path.to_path_buf(),
            reader: Box::new(reader),
            ahead: Vec::new(),
            no_text: changed,
        })
    }

    /// The paragraphs of the text from `reader`; errors name `path`.
    pub fn new(path: &Path, reader: Box<dyn BufRead + Send>) -> Self {
        let no_text = |path: &Path| Error::data(path, "is not UTF-8 text; convert it to UTF-8");
        Self { path: path.to_path_buf(), reader, ahead: Vec::new(), no_text }
    }

    /// The next paragraph; `None` at the end.
    ///
    /// # Errors
    /// If the text cannot be read or is not UTF-8.
    pub fn read(&mut self) -> Result<Option<Paragraph>> {
        let mut bytes = std::mem::take(&mut self.ahead);
        let is_blank = |line: &[u8]| line.iter().all(u8::is_ascii_whitespace);
        let (mut has_text, mut blank_before) = (!is_blank(&bytes), false);
        loop {
            let start = bytes.len();
            let line = (&mut self.reader).take(LONGEST_LINE).read_until(b'\n', &mut bytes);
            let read = line.map_err(|error| Error::io("read", &self.path, error))?;
            if read == 0 {
                break;
            }
            if read as u64 == LONGEST_LINE && bytes.last() != Some(&b'\n') {
                self.ahead = bytes.split_off(between_words(&bytes, start));
                break;
            }
            let blank = is_blank(&bytes[start..]);
            if (has_text && blank_before && !blank) || start >= LONGEST_PARAGRAPH {
                self.ahead = bytes.split_off(start);
                break;
            }
            has_text |= !blank;
            blank_before = blank;
        }
        if bytes.is_empty() {
            return Ok(None);
        }
        // Lines and words end at a byte that is not part of another character, so cutting there
        // keeps UTF-8 valid.
        let text = String::from_utf8(bytes).map_err(|_| (self.no_text)(&self.path))?;
        Ok(Some(Paragraph { text, last: self.ahead.is_empty() }))
    }
}

/// Where to cut a long line that starts at `start`: after its last white space, else before its
/// last character.
fn between_words(bytes: &[u8], start: usize) -> usize {
    // Something must be left for the next paragraph, or this one would look like the last.
    let line = &bytes[start..bytes.len() - 1];
    let after_space = line.iter().rposition(u8::is_ascii_whitespace).map(|at| start + at + 1);
    let is_first_byte = |byte: &u8| byte & 0xc0 != 0x80;
    after_space
        .or_else(|| bytes.iter().rposition(is_first_byte))
        .filter(|&at| at > 0)
        .unwrap_or(bytes.len() - 1)
}

/// The error for text that changed since the scan.
fn changed(path: &Path) -> Error {
    Error::data(
        path,
        "changed while it was read; leave the text alone until the run has started, and start again",
    )
}

/// Collects the files of folders.
struct Walk<'a> {
    except: Option<&'a Path>,
    /// Real paths of visited folders, so that each is read once and link loops end.
    visited: BTreeSet<PathBuf>,
    files: Vec<PathBuf>,
}

impl Walk<'_> {
    fn folder(&mut self, folder: &Path) -> Result<()> {
        let real = fs::canonicalize(folder).map_err(|error| Error::io("resolve", folder, error))?;
        if self.except == Some(&real)
            || !self.visited.insert(real)
            || folder.join(CHECKPOINT_MARK).exists()
        {
            return Ok(());
        }
        let entries =
            fs::read_dir(folder).and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>());
        let mut entries = entries.map_err(|error| Error::io("list", folder, error))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let (name, path) = (entry.file_name(), entry.path());
            let name = name.to_string_lossy();
            // A dangling link is not text.
            let Ok(meta) = fs::metadata(&path) else { continue };
            if name.starts_with('.') {
                continue;
            }
            if meta.is_dir() && !SKIPPED_FOLDERS.contains(&name.as_ref()) {
                self.folder(&path)?;
            } else if meta.is_file() && has_text_extension(&path) {
                self.files.push(path);
            }
        }
        Ok(())
    }
}

fn has_text_extension(path: &Path) -> bool {
    let extension =
        path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
    extension.is_some_and(|extension| TEXT_EXTENSIONS.contains(&extension.as_str()))
}

enum Content {
    Text(u64),
    Empty,
    Binary(String),
}

/// Reads a file, and adds it to `key` if it is text.
fn read_text(path: &Path, key: &mut KeyHasher) -> Result<Content> {
    let mut file = crate::files::open(path).map_err(|error| Error::io("open", path, error))?;
    let mut hasher = key.clone();
    let mut buffer = vec![0u8; 1 << 18];
    // Bytes at the start of the buffer that belong to a character cut by the end of the last read.
    let mut kept = 0;
    let mut length = 0u64;
    loop {
        let read = match file.read(&mut buffer[kept..]) {
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::io("read", path, error)),
        };
        let bytes = &buffer[..kept + read];
        if let Some(at) = bytes[kept..].iter().position(|&byte| byte == 0) {
            return Ok(Content::Binary(format!("byte {} is NUL", length + at as u64)));
        }
        hasher.update(&bytes[kept..]);
        let first = length - kept as u64;
        length += read as u64;
        match std::str::from_utf8(bytes) {
            Ok(_) => kept = 0,
            Err(error) if error.error_len().is_none() && read > 0 => {
                let rest = error.valid_up_to()..bytes.len();
                kept = rest.len();
                buffer.copy_within(rest, 0);
            }
            Err(error) => {
                return Ok(Content::Binary(format!(
                    "byte {} is not UTF-8",
                    first + error.valid_up_to() as u64
                )));
            }
        }
        if read == 0 {
            break;
        }
    }
    if length == 0 {
        return Ok(Content::Empty);
    }
    end_file(&mut hasher, length);
    *key = hasher;
    Ok(Content::Text(length))
}

/// Marks the end of a file in a key, so that the files "ab", "c" and "a", "bc" differ.
fn end_file(hasher: &mut KeyHasher, length: u64) {
    hasher.update(&length.to_le_bytes());
}
