//! Reads Megatron's indexed datasets: `PREFIX.bin` with the tokens, `PREFIX.idx` with their
//! structure.
//!
//! Source: Megatron-LM `core/datasets/indexed_dataset.py`. The index is little-endian:
//! `MMIDIDX\0\0`, u64 version 1, u8 type of the tokens, u64 sequences N, u64 document entries D,
//! then, unaligned from byte 34, i32\[N\] lengths in tokens, i64\[N\] byte offsets into `.bin`,
//! i64\[D\] document boundaries (0 … N, in sequences).
//!
//! Both files are untrusted: everything is checked against the sizes of the files before it is
//! used. They are read with positioned reads instead of memory-mapped, so that truncating a file
//! under a running job is an error and not a signal.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

pub(super) const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
/// Bytes before the arrays.
pub(super) const HEADER: u64 = 34;
/// Bytes of the index to read at a time for checking.
const CHUNK: usize = 1 << 20;

/// How a token is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// 1 byte, code 1.
    U8,
    /// 1 byte, signed, code 2.
    I8,
    /// 2 bytes, signed, code 3.
    I16,
    /// 4 bytes, signed, code 4.
    I32,
    /// 8 bytes, signed, code 5.
    I64,
    /// 2 bytes, code 8.
    U16,
}

impl TokenType {
    /// The type in which Megatron stores tokens of a vocabulary: u16 below 65,500, else i32.
    pub fn for_vocabulary(vocab_size: usize) -> Self {
        if vocab_size < 65_500 { Self::U16 } else { Self::I32 }
    }

    /// The code in the index. 6 (f64) and 7 (f32) exist but are not token types.
    pub fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I8 => 2,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::I64 => 5,
            Self::U16 => 8,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::U8, Self::I8, Self::I16, Self::I32, Self::I64, Self::U16]
            .into_iter()
            .find(|t| t.code() == code)
    }

    /// Bytes of one token.
    pub fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// The largest token id this type can hold.
    pub fn max(self) -> u32 {
        match self {
            Self::U8 => u8::MAX.into(),
            Self::I8 => i8::MAX as u32,
            Self::I16 => i16::MAX as u32,
            Self::U16 => u16::MAX.into(),
            Self::I32 => i32::MAX as u32,
            Self::I64 => u32::MAX,
        }
    }
}

/// An open indexed dataset.
#[derive(Debug)]
pub struct IndexedDataset {
    idx_path: PathBuf,
    bin_path: PathBuf,
    idx: File,
    bin: File,
    token_type: TokenType,
    num_sequences: u64,
    num_boundaries: u64,
    num_tokens: u64,
    /// Sequences are contiguous in `.bin`, so that a run of sequences is a run of bytes.
    contiguous: bool,
}

impl IndexedDataset {
    /// Opens `PREFIX.bin` and `PREFIX.idx` and checks the whole index.
    ///
    /// # Errors
    /// `Error::Data` if a file is missing, empty, truncated, in another format, or contradicts the
    /// other file.
    pub fn open(prefix: impl AsRef<Path>) -> Result<Self> {
        let (bin_path, idx_path) = pair_paths(prefix.as_ref());
        let (idx, idx_len) = open_file(&idx_path, &bin_path)?;
        let (bin, bin_len) = open_file(&bin_path, &idx_path)?;
        let header = Header::read(&idx, &idx_path, idx_len)?;
        let mut dataset = Self {
            idx_path,
            bin_path,
            idx,
            bin,
            token_type: header.token_type,
            num_sequences: header.num_sequences,
            num_boundaries: header.num_boundaries,
            num_tokens: 0,
            contiguous: true,
        };
        dataset.check_sequences(bin_len)?;
        dataset.check_boundaries()?;
        if dataset.num_tokens == 0 {
            return Err(Error::data(
                &dataset.bin_path,
                "holds no tokens; preprocess text that is not empty",
            ));
        }
        Ok(dataset)
    }

    /// Path of the tokens' file.
    pub fn path(&self) -> &Path {
        &self.bin_path
    }

    /// How the tokens are stored.
    pub fn token_type(&self) -> TokenType {
        self.token_type
    }

    /// Sequences.
    pub fn num_sequences(&self) -> u64 {
        self.num_sequences
    }

    /// Documents, each a run of sequences.
    pub fn num_documents(&self) -> u64 {
        self.num_boundaries - 1
    }

    /// Tokens of all sequences.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Whether the sequences are contiguous in `.bin`, as writers leave them.
    pub fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// The sequence at which document `document` begins; `document` = [`Self::num_documents`] gives
    /// the end.
    pub fn document_start(&self, document: u64) -> Result<u64> {
        self.require(document < self.num_boundaries, "document", document, self.num_boundaries)?;
        let boundary = self.read_u64(HEADER + 12 * self.num_sequences + 8 * document)?;
        // Checked at opening; checked again because the file may have been replaced since.
        self.require(boundary <= self.num_sequences, "sequence", boundary, self.num_sequences + 1)?;
        Ok(boundary)
    }

    /// Length in tokens and first byte in `.bin` of a sequence.
    pub fn sequence(&self, sequence: u64) -> Result<(u64, u64)> {
        self.require(sequence < self.num_sequences, "sequence", sequence, self.num_sequences)?;
        let mut length = [0; 4];
        read_at(&self.idx, &self.idx_path, HEADER + 4 * sequence, &mut length)?;
        let offset = self.read_u64(HEADER + 4 * self.num_sequences + 8 * sequence)?;
        Ok((u32::from_le_bytes(length).into(), offset))
    }

    /// The tokens of a sequence.
    pub fn read_sequence(&self, sequence: u64) -> Result<Vec<u32>> {
        let (length, offset) = self.sequence(sequence)?;
        self.require(length <= self.num_tokens, "token", length, self.num_tokens)?;
        let mut tokens = vec![0; length as usize];
        self.read_tokens(offset, &mut tokens)?;
        Ok(tokens)
    }

    /// Lengths in tokens of a range of sequences, in order, a chunk at a time.
    pub fn for_each_length(
        &self,
        sequences: std::ops::Range<u64>,
        mut each: impl FnMut(u64),
    ) -> Result<()> {
        self.require(
            sequences.end <= self.num_sequences,
            "sequence",
            sequences.end,
            self.num_sequences + 1,
        )?;
        let most = sequences.end.saturating_sub(sequences.start).min(CHUNK as u64 / 4);
        let mut buffer = vec![0; 4 * most as usize];
        let mut next = sequences.start;
        while next < sequences.end {
            let count = (sequences.end - next).min(most);
            let bytes = &mut buffer[..count as usize * 4];
            read_at(&self.idx, &self.idx_path, HEADER + 4 * next, bytes)?;
            bytes
                .chunks_exact(4)
                .for_each(|b| each(u32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()));
            next += count;
        }
        Ok(())
    }

    /// Reads tokens from byte `offset` of `.bin` on.
    ///
    /// # Errors
    /// `Error::Data` if the file ends too early, or a stored number is not a token id.
    pub fn read_tokens(&self, offset: u64, out: &mut [u32]) -> Result<()> {
        let size = self.token_type.size();
        let mut bytes = vec![0; out.len() * size];
        read_at(&self.bin, &self.bin_path, offset, &mut bytes)?;
        let mut bad = None;
        for (i, (token, b)) in out.iter_mut().zip(bytes.chunks_exact(size)).enumerate() {
            let value: i64 = match self.token_type {
                TokenType::U8 => b[0].into(),
                TokenType::I8 => i64::from(b[0] as i8),
                TokenType::U16 => u16::from_le_bytes([b[0], b[1]]).into(),
                TokenType::I16 => i16::from_le_bytes([b[0], b[1]]).into(),
                TokenType::I32 => i32::from_le_bytes([b[0], b[1], b[2], b[3]]).into(),
                TokenType::I64 => {
                    i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])
                }
            };
            *token = u32::try_from(value).unwrap_or_else(|_| {
                bad.get_or_insert((i, value));
                0
            });
        }
        match bad {
            None => Ok(()),
            Some((i, value)) => Err(Error::data(
                &self.bin_path,
                format!(
                    "holds {value} at byte {}, which is not a token id; the file is damaged, create it again",
                    offset + (i * size) as u64
                ),
            )),
        }
    }

    /// Reads all tokens and returns the largest; calls `progress` with the number of tokens as they
    /// are read.
    ///
    /// # Errors
    /// As [`Self::read_tokens`].
    pub fn largest_token(&self, progress: &mut dyn FnMut(u64)) -> Result<u32> {
        let mut buffer = vec![0; CHUNK.min(self.num_tokens as usize)];
        let mut largest = 0;
        // A file without gaps is read as one run of tokens, because sequences are often short.
        let runs = if self.contiguous { 1 } else { self.num_sequences };
        for run in 0..runs {
            let (length, offset) =
                if self.contiguous { (self.num_tokens, 0) } else { self.sequence(run)? };
            let mut done = 0;
            while done < length {
                let count = (length - done).min(buffer.len() as u64);
                let tokens = &mut buffer[..count as usize];
                self.read_tokens(offset + done * self.token_type.size() as u64, tokens)?;
                largest = tokens.iter().copied().fold(largest, u32::max);
                done += count;
                progress(count);
            }
        }
        Ok(largest)
    }

    /// Every sequence must be within `.bin`, and `.bin` must end with the last one.
    fn check_sequences(&mut self, bin_len: u64) -> Result<()> {
        let size = self.token_type.size() as u64;
        let most = self.num_sequences.min(CHUNK as u64 / 8) as usize;
        let (mut lengths, mut offsets) = (vec![0; 4 * most], vec![0; 8 * most]);
        let (mut next, mut end_of_last, mut furthest) = (0, 0, 0);
        while next < self.num_sequences {
            let count = (self.num_sequences - next).min(CHUNK as u64 / 8);
            let lengths = &mut lengths[..count as usize * 4];
            let offsets = &mut offsets[..count as usize * 8];
            read_at(&self.idx, &self.idx_path, HEADER + 4 * next, lengths)?;
            read_at(
                &self.idx,
                &self.idx_path,
                HEADER + 4 * self.num_sequences + 8 * next,
                offsets,
            )?;
            for (i, (l, o)) in lengths.chunks_exact(4).zip(offsets.chunks_exact(8)).enumerate() {
                let length = i32::from_le_bytes([l[0], l[1], l[2], l[3]]);
                let offset = i64::from_le_bytes([o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]]);
                let sequence = next + i as u64;
                let (Ok(tokens), Ok(start)) = (u64::try_from(length), u64::try_from(offset)) else {
                    return Err(self.damaged(format!(
                        "sequence {sequence} has length {length} at byte {offset}"
                    )));
                };
                // No overflow: tokens < 2^31 and size ≤ 8, start < 2^63.
                let end = start + tokens * size;
                if end > bin_len {
                    return Err(Error::data(
                        &self.bin_path,
                        format!(
                            "is truncated: it has {bin_len} bytes, but sequence {sequence} of {} spans bytes {start} to \
                             {end} by {}; copy both files again",
                            self.num_sequences,
                            self.idx_path.display()
                        ),
                    ));
                }
                self.contiguous &= start == end_of_last;
                self.num_tokens = self
                    .num_tokens
                    .checked_add(tokens)
                    .ok_or_else(|| self.damaged("the lengths of the sequences overflow".into()))?;
                end_of_last = end;
                furthest = furthest.max(end);
            }
            next += count;
        }
        if furthest != bin_len {
            return Err(Error::data(
                &self.bin_path,
                format!(
                    "has {bin_len} bytes, but {} describes {furthest}; the two files do not belong \
                     together; copy or create both again",
                    self.idx_path.display()
                ),
            ));
        }
        Ok(())
    }

    /// Document boundaries must rise from 0 to N.
    fn check_boundaries(&self) -> Result<()> {
        let mut buffer = vec![0; 8 * self.num_boundaries.min(CHUNK as u64 / 8) as usize];
        let (mut next, mut previous) = (0, 0);
        while next < self.num_boundaries {
            let count = (self.num_boundaries - next).min(CHUNK as u64 / 8);
            let bytes = &mut buffer[..count as usize * 8];
            read_at(&self.idx, &self.idx_path, HEADER + 12 * self.num_sequences + 8 * next, bytes)?;
            for (i, b) in bytes.chunks_exact(8).enumerate() {
                let boundary = u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
                let entry = next + i as u64;
                if boundary < previous
                    || boundary > self.num_sequences
                    || (entry == 0 && boundary != 0)
                {
                    return Err(self.damaged(format!(
                        "document boundary {entry} is sequence {boundary}, but must be between {previous} and {}",
                        self.num_sequences
                    )));
                }
                previous = boundary;
            }
            next += count;
        }
        if previous != self.num_sequences {
            return Err(self.damaged(format!(
                "the last document ends at sequence {previous}, but there are {} sequences",
                self.num_sequences
            )));
        }
        Ok(())
    }

    fn read_u64(&self, at: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        read_at(&self.idx, &self.idx_path, at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn damaged(&self, what: String) -> Error {
        damaged(&self.idx_path, &what)
    }

    fn require(&self, holds: bool, what: &str, index: u64, count: u64) -> Result<()> {
        if holds {
            return Ok(());
        }
        Err(Error::data(
            &self.idx_path,
            format!("{what} {index} was asked for, but there are {count}"),
        ))
    }
}

/// `PREFIX.bin` and `PREFIX.idx`. A prefix may contain dots, so no part of it counts as an
/// extension.
pub(super) fn pair_paths(prefix: &Path) -> (PathBuf, PathBuf) {
    let with = |suffix: &str| {
        let mut path = prefix.as_os_str().to_owned();
        path.push(suffix);
        PathBuf::from(path)
    };
    (with(".bin"), with(".idx"))
}

fn damaged(path: &Path, what: &str) -> Error {
    Error::data(path, format!("is damaged: {what}; copy it again or rebuild the dataset"))
}

fn open_file(path: &Path, other: &Path) -> Result<(File, u64)> {
    let file = crate::files::open_binary(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::data(
            path,
            format!("does not exist; an indexed dataset needs this file and {}", other.display()),
        ),
        _ => Error::io("open", path, error),
    })?;
    let meta = file.metadata().map_err(|error| Error::io("inspect", path, error))?;
    if !meta.is_file() {
        return Err(Error::data(
            path,
            "is not a regular file; give the prefix of an indexed dataset",
        ));
    }
    if meta.len() == 0 {
        return Err(Error::data(path, "is empty; copy it again or rebuild the dataset"));
    }
    Ok((file, meta.len()))
}

fn read_at(file: &File, path: &Path, offset: u64, bytes: &mut [u8]) -> Result<()> {
    file.read_exact_at(bytes, offset).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Error::data(
            path,
            format!(
                "ends before byte {}; it was truncated, copy it again",
                offset.saturating_add(bytes.len() as u64)
            ),
        ),
        _ => Error::io("read", path, error),
    })
}

struct Header {
    token_type: TokenType,
    num_sequences: u64,
    num_boundaries: u64,
}

impl Header {
    fn read(file: &File, path: &Path, len: u64) -> Result<Self> {
        if len < HEADER {
            return Err(Error::data(
                path,
                format!(
                    "is truncated: it has {len} bytes, the header alone has {HEADER}; copy it again"
                ),
            ));
        }
        let mut bytes = [0u8; HEADER as usize];
        read_at(file, path, 0, &mut bytes)?;
        let u64_at = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if &bytes[..9] != MAGIC {
            return Err(Error::data(
                path,
                "does not begin with MMIDIDX, so it is not a Megatron index; give the prefix of an indexed dataset",
            ));
        }
        if u64_at(9) != VERSION {
            return Err(Error::data(
                path,
                format!(
                    "has version {}, but only version {VERSION} is supported; rebuild the dataset",
                    u64_at(9)
                ),
            ));
        }
        let token_type = TokenType::from_code(bytes[17]).ok_or_else(|| {
            Error::data(
                path,
                format!(
                    "gives tokens type {}, which is not an integer type; rebuild the dataset",
                    bytes[17]
                ),
            )
        })?;
        let (num_sequences, num_boundaries) = (u64_at(18), u64_at(26));
        let expected = num_sequences
            .checked_mul(12)
            .and_then(|sequences| {
                num_boundaries.checked_mul(8)?.checked_add(sequences)?.checked_add(HEADER)
            })
            .ok_or_else(|| {
                damaged(
                    path,
                    &format!(
                        "it claims {num_sequences} sequences and {num_boundaries} document entries"
                    ),
                )
            })?;
        if expected != len {
            return Err(Error::data(
                path,
                format!(
                    "has {len} bytes, but {num_sequences} sequences and {num_boundaries} document \
                     entries need {expected}: it is {}; copy it again or rebuild the dataset",
                    if len < expected { "truncated" } else { "damaged or of a newer format" }
                ),
            ));
        }
        if num_boundaries == 0 {
            return Err(damaged(path, "it has no document boundaries"));
        }
        Ok(Self { token_type, num_sequences, num_boundaries })
    }
}
