//! Columns of text in Parquet files, as Hugging Face datasets are stored.
//!
//! Source: Apache parquet-format 2.12 (`README.md`, `parquet.thrift`, `Encodings.md`,
//! `Compression.md`). Only flat columns of byte strings are read, in every encoding that these
//! have. Files are untrusted: at most one page of a column is in memory, page sizes are bounded,
//! and contradictory files are errors.
//!
//! Why not the `parquet` crate: on 4,463 mutated or hand-made files, under a limit of 512 MiB, its
//! version 60.1 ran out of memory on 49 (109 bytes are enough), panicked on 53, overflowed the
//! stack on one, and took 256 MiB for 124 bytes on others; its zstd is C. This reader survives all
//! of them and takes less than 64 MiB. A child process would contain such failures, but could not
//! say what is wrong and where, nor tell a hostile file from a large one.

mod encoding;
mod metadata;
mod page;
mod thrift;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use megatron::Error;

use super::documents::LONGEST_LINE;
use encoding::{Dictionary, Hybrid, Strings};
use metadata::{ChunkInfo, ColumnInfo, Metadata, RowGroup};
use page::{DATA, DATA_2, DICTIONARY, LARGEST_PAGE, PageHeader, decompress};

/// The value that was read, or the error.
type Read<T> = std::result::Result<T, String>;

pub const MAGIC: &[u8; 4] = b"PAR1";
/// Length and magic number at the end.
const TAIL: u64 = 8;
/// The longest footer that is read.
const LONGEST_FOOTER: u64 = 64 << 20;
/// Bytes that are first read for a page's header; statistics in it can contain long texts.
const HEADER_BYTES: u64 = 1 << 10;
/// The only encoding of levels in use.
const RLE: i64 = 3;

/// The rows of a file, in order.
pub struct Rows {
    path: PathBuf,
    file: File,
    keys: Vec<String>,
    columns: Vec<ColumnInfo>,
    groups: std::vec::IntoIter<RowGroup>,
    /// The current group: rows left, and a reader for each key.
    left: u64,
    readers: Vec<Column>,
    row: u64,
}

impl Rows {
    /// Opens a file for its columns `keys`.
    ///
    /// # Errors
    /// `Error::Data` if it is not a complete Parquet file, or a column is missing or is not text.
    pub fn open(path: &Path, keys: &[String]) -> megatron::Result<Self> {
        let file =
            megatron::files::open_binary(path).map_err(|error| Error::io("open", path, error))?;
        let read = |error| Error::io("read", path, error);
        let size = file.metadata().map_err(|error| Error::io("inspect", path, error))?.len();
        let damaged = |what: &str| {
            Error::data(
                path,
                format!("is not a complete Parquet file: {what}; copy or create it again"),
            )
        };
        let mut tail = [0; TAIL as usize];
        if size < TAIL + 4 {
            return Err(damaged(&format!("it has {size} bytes")));
        }
        file.read_exact_at(&mut tail, size - TAIL).map_err(read)?;
        if tail[4..] == *b"PARE" {
            return Err(Error::data(path, "is encrypted; decrypt it first"));
        }
        if tail[4..] != *MAGIC {
            return Err(damaged("it does not end with PAR1"));
        }
        let footer = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
        if footer > LONGEST_FOOTER || footer > size - TAIL - 4 {
            return Err(damaged(&format!("its footer claims {footer} of its {size} bytes")));
        }
        let data_end = size - TAIL - footer;
        let mut bytes = vec![0; footer as usize];
        file.read_exact_at(&mut bytes, data_end).map_err(read)?;
        let Metadata { columns, groups } = Metadata::read(&bytes, keys, data_end)
            .map_err(|what| Error::data(path, format!("as Parquet: {what}")))?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            keys: keys.to_vec(),
            columns,
            groups: groups.into_iter(),
            left: 0,
            readers: Vec::new(),
            row: 0,
        })
    }

    /// The texts of the next row: one for each key, none if the row has no value.
    ///
    /// # Errors
    /// `Error::Data` if the file is damaged or a text is not UTF-8.
    pub fn read(&mut self) -> megatron::Result<Option<Vec<Vec<String>>>> {
        while self.left == 0 {
            let Some(RowGroup { rows, chunks }) = self.groups.next() else { return Ok(None) };
            self.left = rows;
            self.readers = chunks
                .into_iter()
                .zip(&self.columns)
                .map(|(chunk, info)| Column::new(chunk, info.optional))
                .collect();
        }
        self.left -= 1;
        self.row += 1;
        let (file, path, row) = (&self.file, &self.path, self.row);
        let texts = self.readers.iter_mut().zip(&self.keys).map(|(column, key)| {
            column
                .text(file)
                .map(Vec::from_iter)
                .map_err(|what| Error::data(path, format!("column {key:?}, row {row}: {what}")))
        });
        texts.collect::<megatron::Result<_>>().map(Some)
    }
}

/// A column of a row group.
struct Column {
    codec: i64,
    optional: bool,
    /// Position of the next page, and end of the last one.
    at: u64,
    end: u64,
    dictionary: Option<Dictionary>,
    page: Option<Page>,
}

/// A page that is being read.
struct Page {
    bytes: Vec<u8>,
    /// Values left, including nulls.
    left: u32,
    /// For each value, whether it is present.
    levels: Option<(Vec<u8>, Hybrid)>,
    strings: Strings,
}

impl Column {
    fn new(chunk: ChunkInfo, optional: bool) -> Self {
        let ChunkInfo { codec, start, end } = chunk;
        Self { codec, optional, at: start, end, dictionary: None, page: None }
    }

    /// The next value; `None` if it is null.
    fn text(&mut self, file: &File) -> Read<Option<String>> {
        while self.page.as_ref().is_none_or(|page| page.left == 0) {
            self.page = None; // before there is another
            self.next_page(file)?;
        }
        let Some(page) = &mut self.page else { return Err("it has no pages".into()) };
        page.left -= 1;
        if let Some((bytes, levels)) = &mut page.levels
            && levels.next(bytes)? == 0
        {
            return Ok(None);
        }
        let none = Dictionary::default();
        let text = page.strings.next(&page.bytes, self.dictionary.as_ref().unwrap_or(&none))?;
        if text.len() as u64 > LONGEST_LINE {
            return Err(format!(
                "a string has more than {} MiB; split it into several",
                LONGEST_LINE >> 20
            ));
        }
        let text =
            std::str::from_utf8(text).map_err(|error| format!("it is not UTF-8: {error}"))?;
        Ok(Some(text.to_owned()))
    }

    fn read(&self, file: &File, from: u64, len: u64) -> Read<Vec<u8>> {
        if len > self.end - from {
            return Err(format!("a page of {len} bytes does not fit into its column"));
        }
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, from)
            .map_err(|error| format!("it cannot be read: {error}"))?;
        Ok(bytes)
    }

    fn next_page(&mut self, file: &File) -> Read<()> {
        let (mut looked_at, left) = (HEADER_BYTES, self.end - self.at);
        if left == 0 {
            return Err("the column ends before its rows do".into());
        }
        let (header, len) = loop {
            let bytes = self.read(file, self.at, looked_at.min(left))?;
            match PageHeader::read(&bytes)? {
                Some(header) => break header,
                None if looked_at < left.min(LARGEST_PAGE) => looked_at *= 16,
                None => return Err("the header of a page ends too early".into()),
            }
        };
        self.at += len;
        let stored = self.read(file, self.at, header.stored)?;
        self.at += header.stored;
        header.check(&stored)?;
        match header.kind {
            DATA => self.page = Some(self.data(&header, stored)?),
            DATA_2 => self.page = Some(self.data_2(&header, stored)?),
            DICTIONARY => match header.encoding {
                0 | 2 => {
                    let bytes = decompress(self.codec, stored, header.size)?;
                    self.dictionary = Some(Dictionary::new(bytes, header.values)?);
                }
                other => return Err(format!("a dictionary has the encoding {other}")),
            },
            _ => {} // of indices, which nothing here needs
        }
        Ok(())
    }

    /// A page of the first kind: levels and values are compressed together.
    fn data(&self, header: &PageHeader, stored: Vec<u8>) -> Read<Page> {
        let bytes = decompress(self.codec, stored, header.size)?;
        let (mut levels, mut at) = (None, 0);
        if self.optional {
            if header.level_encoding != RLE {
                return Err(format!(
                    "levels have the encoding {}, which is not supported",
                    header.level_encoding
                ));
            }
            let len = bytes.first_chunk().map_or(u32::MAX, |len| u32::from_le_bytes(*len)) as usize;
            at = len
                .checked_add(4)
                .filter(|&end| end <= bytes.len())
                .ok_or("levels extend past their page")?;
            let held = bytes[4..at].to_vec();
            let runs = Hybrid::new(0, held.len(), 1)?;
            levels = Some((held, runs));
        }
        let strings = Strings::new(&bytes, at, header.encoding, self.dictionary.is_some())?;
        Ok(Page { bytes, left: header.values, levels, strings })
    }

    /// A page of the second kind: levels come first and are not compressed.
    fn data_2(&self, header: &PageHeader, mut stored: Vec<u8>) -> Read<Page> {
        let before = header.repetition_bytes + header.definition_bytes;
        if before > header.stored || before > header.size {
            return Err("levels extend past their page".into());
        }
        let compressed = stored.split_off(before as usize);
        let held = stored.split_off(header.repetition_bytes as usize);
        let runs = Hybrid::new(0, held.len(), 1)?;
        let levels = self.optional.then_some((held, runs));
        let codec = if header.is_compressed { self.codec } else { 0 };
        let bytes = decompress(codec, compressed, header.size - before)?;
        let strings = Strings::new(&bytes, 0, header.encoding, self.dictionary.is_some())?;
        Ok(Page { bytes, left: header.values, levels, strings })
    }
}

#[cfg(test)]
mod tests;
