//! The pages of a column: their headers, and their decompression.
//!
//! Source: parquet-format, `README.md` (data pages), `Compression.md`.

use std::io::Read as _;

use flate2::Crc;
use flate2::bufread::MultiGzDecoder;

use super::super::input::ZstdFrames;
use super::Read;
use super::thrift::{ENDS, Kind, Thrift};

/// Bytes of the largest page that is read, compressed or not; memory is bounded by a few of them.
/// Writers usually make pages of about a megabyte, or of one long text.
pub const LARGEST_PAGE: u64 = 256 << 20;

/// The kinds of pages.
pub const DATA: i64 = 0;
pub const DICTIONARY: i64 = 2;
pub const DATA_2: i64 = 3;

/// The header of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageHeader {
    pub kind: i64,
    /// Size in bytes, decompressed and in the file.
    pub size: u64,
    pub stored: u64,
    /// CRC-32 of the bytes in the file.
    pub crc: Option<u32>,
    /// Values, including nulls.
    pub values: u32,
    pub encoding: i64,
    pub level_encoding: i64,
    /// Bytes of levels before the data of a page of the second kind.
    pub repetition_bytes: u64,
    pub definition_bytes: u64,
    pub is_compressed: bool,
}

impl PageHeader {
    /// Reads a header; returns it and its length. `None` if there are too few bytes.
    pub fn read(bytes: &[u8]) -> Read<Option<(Self, u64)>> {
        let mut thrift = Thrift::new(bytes);
        let mut header = Self { kind: -1, is_compressed: true, ..Self::default() };
        let read = thrift.structure(&mut |id, kind, thrift| {
            match (id, kind) {
                (1, Kind::Int) => header.kind = thrift.int()?,
                (2, Kind::Int) => header.size = page_size(thrift.int()?)?,
                (3, Kind::Int) => header.stored = page_size(thrift.int()?)?,
                (4, Kind::Int) => header.crc = Some(thrift.int()? as u32),
                // The headers of dictionaries and of both kinds of data pages.
                (5 | 7 | 8, Kind::Struct) => header.described(id, thrift)?,
                _ => return Ok(false),
            }
            Ok(true)
        });
        match read {
            Ok(()) => Ok(Some((header, (bytes.len() - thrift.left()) as u64))),
            Err(message) if message == ENDS => Ok(None),
            Err(message) => Err(message),
        }
    }

    fn described(&mut self, of: i64, thrift: &mut Thrift) -> Read<()> {
        thrift.structure(&mut |id, kind, thrift| {
            match (of, id, kind) {
                (_, 1, Kind::Int) => {
                    let values = thrift.int()?;
                    self.values =
                        values.try_into().map_err(|_| format!("a page has {values} values"))?;
                }
                (5 | 7, 2, Kind::Int) | (8, 4, Kind::Int) => self.encoding = thrift.int()?,
                (5, 3, Kind::Int) => self.level_encoding = thrift.int()?,
                (8, 5, Kind::Int) => self.definition_bytes = page_size(thrift.int()?)?,
                (8, 6, Kind::Int) => self.repetition_bytes = page_size(thrift.int()?)?,
                (8, 7, Kind::Bool(value)) => self.is_compressed = value,
                _ => return Ok(false),
            }
            Ok(true)
        })
    }

    /// Checks the bytes in the file, if the header has a checksum.
    pub fn check(&self, stored: &[u8]) -> Read<()> {
        let Some(crc) = self.crc else { return Ok(()) };
        let mut actual = Crc::new();
        actual.update(stored);
        if actual.sum() == crc { Ok(()) } else { Err("a page does not match its checksum".into()) }
    }
}

fn page_size(bytes: i64) -> Read<u64> {
    match u64::try_from(bytes) {
        Ok(size @ 0..=LARGEST_PAGE) => Ok(size),
        Ok(_) => Err(format!(
            "a page has {bytes} bytes, more than {} MiB; write it with smaller pages",
            LARGEST_PAGE >> 20
        )),
        Err(_) => Err(format!("a page has {bytes} bytes")),
    }
}

/// The names of codecs, by number.
const CODECS: [&str; 8] =
    ["none", "Snappy", "gzip", "LZO", "Brotli", "Hadoop's LZ4", "zstd", "LZ4"];

/// Decompresses `stored` to `size` bytes. A larger result is detected before it is produced.
pub fn decompress(codec: i64, stored: Vec<u8>, size: u64) -> Read<Vec<u8>> {
    let expected = size as usize; // at most LARGEST_PAGE
    let broken = |why: &dyn std::fmt::Display| format!("a page cannot be decompressed: {why}");
    let read = |mut source: Box<dyn std::io::Read + '_>| {
        let mut bytes = Vec::new();
        source.by_ref().take(size + 1).read_to_end(&mut bytes).map_err(|error| broken(&error))?;
        Ok::<_, String>(bytes)
    };
    // The largest expansion of one byte with these codecs.
    let most = |factor: usize| {
        if expected / factor > stored.len() { Err(broken(&"its size is wrong")) } else { Ok(()) }
    };
    let bytes = match codec {
        // If all values of a page are null, writers store nothing.
        _ if stored.is_empty() => stored,
        0 => stored,
        1 => {
            most(64)?;
            match snap::raw::decompress_len(&stored) {
                Ok(len) if len == expected => {}
                _ => return Err(broken(&"its size is wrong")),
            }
            snap::raw::Decoder::new().decompress_vec(&stored).map_err(|error| broken(&error))?
        }
        2 => read(Box::new(MultiGzDecoder::new(&stored[..])))?,
        6 => read(Box::new(ZstdFrames::new(&stored[..])))?,
        7 => {
            most(256)?;
            lz4_flex::block::decompress(&stored, expected).map_err(|error| broken(&error))?
        }
        _ => {
            let name = usize::try_from(codec)
                .ok()
                .and_then(|codec| CODECS.get(codec))
                .unwrap_or(&"an unknown codec");
            return Err(format!(
                "it is compressed with {name}, which is not supported; write it with Snappy, gzip, zstd or LZ4_RAW"
            ));
        }
    };
    if bytes.len() != expected {
        return Err(broken(&"its size is wrong"));
    }
    Ok(bytes)
}
