//! Input files: their format, and their text, compressed or not.
//!
//! The first bytes show the compression (RFC 1952, RFC 8878), the name shows the format. No file is
//! read as a whole: a file that decompresses to more than memory costs time, not memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use megatron::Error;
use megatron::data::Corpus;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::parquet::MAGIC;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Each line is a JSON object and a document.
    JsonLines,
    /// The file is one document, its paragraphs are sequences.
    Text,
    /// Each row is a document. Compression is part of the format.
    Parquet,
}

const BUFFER: usize = 1 << 18;
const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Magic number of skippable frames; the lower half of the first byte is arbitrary.
const ZSTD_SKIPPABLE: [u8; 3] = [0x2a, 0x4d, 0x18];

/// Known but unsupported formats by their first bytes, with the advice for each.
const REFUSED: &[(&[u8], &str)] = &[
    (MAGIC, "is Parquet; rename it to .parquet"),
    (b"BZh", "is compressed with bzip2, which is not supported; recompress it with gzip or zstd"),
    (
        &[0xfd, b'7', b'z', b'X', b'Z', 0],
        "is compressed with xz, which is not supported; recompress it with gzip or zstd",
    ),
    (b"PK\x03\x04", "is a zip archive, which is not supported; unpack it"),
];

/// An input file.
#[derive(Clone, Debug)]
pub struct Input {
    pub path: PathBuf,
    pub format: Format,
}

impl Input {
    /// The files of a path: the file itself, or the text files of a folder, as `pretrain` reads
    /// them.
    ///
    /// # Errors
    /// `Error::Data` if a file is missing or has an unsupported format, or the folder holds no
    /// text.
    pub fn of(path: &Path) -> megatron::Result<Vec<Self>> {
        if !path.is_dir() {
            return Ok(vec![Self::new(path)?]);
        }
        let text = Corpus::scan(&[path.to_path_buf()], Path::new(""))?;
        Ok(text
            .files()
            .iter()
            .map(|file| Self { path: file.clone(), format: Format::Text })
            .collect())
    }

    /// Detects the format of a file that must exist.
    ///
    /// # Errors
    /// `Error::Data` if the file is missing or has an unsupported format.
    pub fn new(path: &Path) -> megatron::Result<Self> {
        let (format, is_told) = format(path);
        let input = Self { path: path.to_path_buf(), format };
        let mut file = input.buffered()?;
        let start = file.fill_buf().map_err(|error| Error::io("read", path, error))?;
        if input.format == Format::Parquet {
            return match start.starts_with(MAGIC) {
                true => Ok(input),
                false => Err(Error::data(
                    path,
                    "is not Parquet: it does not begin with PAR1; copy, unpack or rename it",
                )),
            };
        }
        match REFUSED.iter().find(|(magic, _)| start.starts_with(magic)) {
            Some((_, why)) => Err(Error::data(path, *why)),
            None if !is_told && input.begins_with_record()? => Err(Error::data(
                path,
                "begins with a JSON object, but its name does not show its format; rename it to \
                 .jsonl (one JSON object per line) or .txt (text), followed by .gz or .zst if it \
                 is compressed",
            )),
            None => Ok(input),
        }
    }

    /// Whether the first line is a JSON object.
    fn begins_with_record(&self) -> megatron::Result<bool> {
        let mut content = self.open()?;
        let start = content.fill_buf().map_err(|error| Error::io("read", &self.path, error))?;
        let line = start.split(|&byte| byte == b'\n').next().unwrap_or_default();
        Ok(serde_json::from_slice::<serde_json::Map<String, serde_json::Value>>(line).is_ok())
    }

    /// The content, decompressed.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn open(&self) -> megatron::Result<Box<dyn BufRead + Send>> {
        let mut file = self.buffered()?;
        let start = file.fill_buf().map_err(|error| Error::io("read", &self.path, error))?;
        let is_skippable =
            start.len() >= 4 && start[0] & 0xf0 == 0x50 && start[1..4] == ZSTD_SKIPPABLE;
        Ok(if start.starts_with(GZIP) {
            Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(file)))
        } else if start.starts_with(ZSTD) || is_skippable {
            Box::new(BufReader::with_capacity(BUFFER, ZstdFrames::new(file)))
        } else {
            Box::new(file)
        })
    }

    fn buffered(&self) -> megatron::Result<BufReader<File>> {
        let path = &self.path;
        let unreadable = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Error::data(path, "does not exist"),
            _ => Error::io("open", path, error),
        };
        // Checked before opening, because opening a pipe waits for its writer.
        let meta = std::fs::metadata(path).map_err(unreadable)?;
        if meta.is_dir() {
            return Err(Error::data(path, "is a folder; give the files in it"));
        }
        if !meta.is_file() {
            return Err(Error::data(
                path,
                "is a pipe or a device, which cannot be read twice; write its content to a file",
            ));
        }
        let file = megatron::files::open_binary(path).map_err(unreadable)?;
        Ok(BufReader::with_capacity(BUFFER, file))
    }
}

/// A file of records in a folder or its subfolders, where records are not read.
pub fn records_in(folder: &Path) -> Option<PathBuf> {
    // A folder that cannot be listed is reported when its text is read.
    for entry in std::fs::read_dir(folder).ok()?.flatten() {
        let (path, is_hidden) =
            (entry.path(), entry.file_name().as_encoded_bytes().starts_with(b"."));
        let found = match format(&path) {
            _ if is_hidden => None,
            // Links are not followed, because they can form loops.
            _ if entry.file_type().is_ok_and(|kind| kind.is_dir()) => records_in(&path),
            // .json files in folders are mostly settings.
            (Format::JsonLines | Format::Parquet, _) if !bare_name(&path).ends_with(".json") => {
                Some(path)
            }
            _ => None,
        };
        if found.is_some() {
            return found;
        }
    }
    None
}

/// A file's name in lower case, without the compression's extension.
fn bare_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    let bare = [".gz", ".zst", ".zstd"]
        .iter()
        .find_map(|ending| name.strip_suffix(ending))
        .map(str::to_string);
    bare.unwrap_or(name)
}

/// The format by a file's name, and whether the name shows it: files with other names count as
/// text.
fn format(path: &Path) -> (Format, bool) {
    match bare_name(path).rsplit_once('.').map(|(_, ending)| ending) {
        Some("jsonl" | "json" | "ndjson") => (Format::JsonLines, true),
        Some("parquet") => (Format::Parquet, true),
        Some("txt" | "text") => (Format::Text, true),
        _ => (Format::Text, false),
    }
}

/// The frames of a zstd file, one after another.
pub struct ZstdFrames<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> ZstdFrames<R> {
    pub fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new(), in_frame: false }
    }

    /// Starts the next frame; false at the end of the file.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.decoder.reset(&mut self.source) {
                Ok(()) => {
                    self.in_frame = true;
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let skipped =
                        io::copy(&mut (&mut self.source).take(length.into()), &mut io::sink())?;
                    if skipped < length.into() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        }
        Ok(false)
    }

    fn end_frame(&mut self) -> io::Result<()> {
        self.in_frame = false;
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(stored), Some(found)) if stored != found => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "its checksum is wrong"))
            }
            _ => Ok(()),
        }
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame && !self.next_frame()? {
                return Ok(0);
            }
            while self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 {
                return Ok(read);
            }
            self.end_frame()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(name: &str, content: &[u8]) -> megatron::Result<Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        let mut bytes = Vec::new();
        let mut reader = Input::new(&path)?.open()?;
        reader.read_to_end(&mut bytes).map_err(|error| Error::io("read", &path, error))?;
        Ok(bytes)
    }

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    /// `printf 'hello zstd\n' | zstd -c`: a frame with a checksum.
    const FRAME: &[u8] = &[
        0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x58, 0x59, 0x00, 0x00, 0x68, 0x65, 0x6c, 0x6c, 0x6f, 0x20,
        0x7a, 0x73, 0x74, 0x64, 0x0a, 0x6c, 0x57, 0xf9, 0x51,
    ];

    fn text(lines: usize) -> Vec<u8> {
        (0..lines).flat_map(|i| format!("line {i}\n").into_bytes()).collect()
    }

    #[test]
    fn compression_is_told_by_content() {
        let plain = text(100_000);
        assert_eq!(read("a.txt", &plain).unwrap(), plain);
        assert_eq!(read("a.txt.gz", &gzip(&plain)).unwrap(), plain);
        assert_eq!(read("a.txt", &gzip(&plain)).unwrap(), plain);
        assert_eq!(read("a.txt.gz", &plain).unwrap(), plain);
        let zstd = ruzstd::encoding::compress_to_vec(
            &plain[..],
            ruzstd::encoding::CompressionLevel::Fastest,
        );
        assert_eq!(read("a.jsonl.zst", &zstd).unwrap(), plain);
    }

    #[test]
    fn frames_and_members_follow_one_another_and_what_is_to_be_skipped_is() {
        let skippable = [0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        assert_eq!(
            read("a.txt.zst", &[FRAME, &skippable, FRAME].concat()).unwrap(),
            b"hello zstd\nhello zstd\n"
        );
        assert_eq!(read("a.txt.zst", &[&skippable, FRAME].concat()).unwrap(), b"hello zstd\n");
        assert_eq!(read("a.txt.gz", &[gzip(b"a"), gzip(b"b")].concat()).unwrap(), b"ab");
    }

    #[test]
    fn damaged_files_are_errors() {
        for at in 4..FRAME.len() {
            let mut frame = FRAME.to_vec();
            frame[at] ^= 0x10;
            assert!(
                read("a.txt.zst", &frame).map_or(true, |content| content == b"hello zstd\n"),
                "byte {at}"
            );
        }
        let last = FRAME.len() - 1;
        assert!(read("a.txt.zst", &[&FRAME[..last], &[FRAME[last] ^ 1]].concat()).is_err());
        assert!(read("a.txt.zst", &FRAME[..last]).is_err());
        assert!(read("a.txt.zst", &[0x5a, 0x2a, 0x4d, 0x18, 0xff, 0xff, 0xff, 0xff, 1]).is_err());
        let gzip = gzip(&text(100));
        assert!(read("a.txt.gz", &gzip[..gzip.len() - 1]).is_err());
        let mut flipped = gzip.clone();
        flipped[gzip.len() - 6] ^= 1;
        assert!(read("a.txt.gz", &flipped).is_err());
    }

    /// A frame that asks for a window of 2^41 bytes.
    #[test]
    fn a_window_beyond_reason_is_refused_before_it_is_made() {
        let message =
            read("a.txt.zst", &[0x28, 0xb5, 0x2f, 0xfd, 0, 0xf8, 1, 0, 0]).unwrap_err().to_string();
        assert!(message.contains("a.txt.zst"), "{message}");
    }

    #[test]
    fn what_is_not_read_is_refused_by_name() {
        for (name, content, part) in [
            ("a.parquet", &b"text"[..], "PAR1"),
            ("a.parquet.gz", &[0x1f, 0x8b], "unpack"),
            ("a.jsonl", b"PAR1....", ".parquet"),
            ("a.txt.bz2", b"BZh9", "bzip2"),
            ("a.txt", b"BZh9", "bzip2"),
            ("a.jsonl", b"\xfd7zXZ\0", "xz"),
            ("a", b"{\"text\": 1}\n", ".jsonl"),
            ("a.md.gz", &gzip(b"{\"text\": 1}"), ".jsonl"),
        ] {
            let message = read(name, content).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains(part), "{message}");
        }
        for path in ["/nowhere/a.txt", "/nowhere/a.md", "/nowhere/a"] {
            let message = Input::of(Path::new(path)).unwrap_err().to_string();
            assert!(message.contains(&format!("{path}: does not exist")), "{message}");
        }
    }

    #[test]
    fn text_of_any_name_and_folders_of_it_are_read_as_in_training() {
        for name in ["README.md", "a", "a.rs.gz", "a.csv"] {
            assert_eq!(read(name, b"{text}").unwrap(), b"{text}");
        }
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, content: &str| std::fs::write(folder.path().join(name), content).unwrap();
        std::fs::create_dir(folder.path().join("c")).unwrap();
        for name in ["b.txt", "a.md", "c/d.rs", "settings.json", ".hidden.txt"] {
            write(name, "x");
        }
        write("empty.md", "");
        let names = |inputs: Vec<Input>| -> Vec<String> {
            let bare = |input: Input| {
                input.path.strip_prefix(folder.path()).unwrap().display().to_string()
            };
            inputs.into_iter().map(bare).collect()
        };
        assert_eq!(names(Input::of(folder.path()).unwrap()), ["a.md", "b.txt", "c/d.rs"]);
        assert_eq!(records_in(folder.path()), None);
        write("c/e.jsonl.gz", "");
        assert_eq!(records_in(folder.path()), Some(folder.path().join("c/e.jsonl.gz")));
    }
}
