//! Thrift's compact protocol, the format of Parquet's metadata.
//!
//! Source: Apache Thrift, `doc/specs/thrift-compact-protocol.md`. Nothing is allocated here, so
//! false lengths cost nothing.

use super::Read;

/// A reader of fields of any kind; the caller reads or skips each field.
#[derive(Clone, Copy, Debug)]
pub struct Thrift<'a> {
    bytes: &'a [u8],
}

/// The type of a field or element, with its value if the type encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Bool(bool),
    Byte,
    /// Integers of 16, 32 and 64 bits have the same encoding.
    Int,
    Double,
    Binary,
    List,
    Map,
    Struct,
}

/// The message if the bytes end too early; more bytes may help.
pub const ENDS: &str = "it ends too early";
/// Structures within structures; Parquet's have fewer than 10.
const DEEPEST: u32 = 32;

impl<'a> Thrift<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Bytes that are not yet read.
    pub fn left(&self) -> usize {
        self.bytes.len()
    }

    fn byte(&mut self) -> Read<u8> {
        let (&first, rest) = self.bytes.split_first().ok_or(ENDS)?;
        self.bytes = rest;
        Ok(first)
    }

    fn unsigned(&mut self) -> Read<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("a number has more than 64 bits".into())
    }

    pub fn int(&mut self) -> Read<i64> {
        let value = self.unsigned()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    pub fn binary(&mut self) -> Read<&'a [u8]> {
        let len = self.unsigned()?;
        self.take(len)
    }

    fn take(&mut self, len: u64) -> Read<&'a [u8]> {
        let len = usize::try_from(len).ok().filter(|&len| len <= self.bytes.len()).ok_or(ENDS)?;
        let (taken, rest) = self.bytes.split_at(len);
        self.bytes = rest;
        Ok(taken)
    }

    /// Passes every field of a structure to `f`, which reads it or returns that it did not.
    pub fn structure(&mut self, f: &mut dyn FnMut(i64, Kind, &mut Self) -> Read<bool>) -> Read<()> {
        self.fields(0, f)
    }

    fn fields(
        &mut self,
        depth: u32,
        f: &mut dyn FnMut(i64, Kind, &mut Self) -> Read<bool>,
    ) -> Read<()> {
        let mut id = 0i64;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(());
            }
            id = match head >> 4 {
                0 => self.int()?,
                delta => id.saturating_add(delta.into()),
            };
            let kind = kind(head & 0x0f)?;
            if !f(id, kind, self)? {
                self.skip(kind, depth)?;
            }
        }
    }

    /// The kind and number of a list's elements, which follow.
    pub fn list(&mut self) -> Read<(Kind, u64)> {
        let head = self.byte()?;
        let len = match head >> 4 {
            15 => self.unsigned()?,
            len => len.into(),
        };
        Ok((kind(head & 0x0f)?, len))
    }

    fn skip(&mut self, what: Kind, depth: u32) -> Read<()> {
        if depth > DEEPEST {
            return Err("it is nested too deeply".into());
        }
        match what {
            Kind::Bool(_) => Ok(()),
            Kind::Byte => self.byte().map(drop),
            Kind::Int => self.unsigned().map(drop),
            Kind::Double => self.take(8).map(drop),
            Kind::Binary => self.binary().map(drop),
            Kind::Struct => self.fields(depth + 1, &mut |_, _, _| Ok(false)),
            Kind::List => {
                let (kind, len) = self.list()?;
                (0..len).try_for_each(|_| self.skip_element(kind, depth + 1))
            }
            Kind::Map => {
                let len = self.unsigned()?;
                if len == 0 {
                    return Ok(());
                }
                let kinds = self.byte()?;
                let (key, value) = (kind(kinds >> 4)?, kind(kinds & 0x0f)?);
                (0..len).try_for_each(|_| {
                    self.skip_element(key, depth + 1)?;
                    self.skip_element(value, depth + 1)
                })
            }
        }
    }

    /// As [`Self::skip`], but in lists and maps a boolean is a byte.
    fn skip_element(&mut self, what: Kind, depth: u32) -> Read<()> {
        match what {
            Kind::Bool(_) => self.byte().map(drop),
            _ => self.skip(what, depth),
        }
    }
}

fn kind(number: u8) -> Read<Kind> {
    Ok(match number {
        1 => Kind::Bool(true),
        2 => Kind::Bool(false),
        3 => Kind::Byte,
        4..=6 => Kind::Int,
        7 => Kind::Double,
        8 => Kind::Binary,
        9 | 10 => Kind::List,
        11 => Kind::Map,
        12 => Kind::Struct,
        _ => return Err(format!("a field has the unknown type {number}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_handed_out_and_others_passed_over() {
        // 1: int −3; 2: list of two booleans; 4: binary "ab"; 40: struct { 1: map {1: 2} }; 41:
        // true
        let bytes = [
            0x15, 5, 0x19, 0x21, 1, 2, 0x28, 2, b'a', b'b', 0x0c, 80, 0x1b, 1, 0x55, 2, 4, 0, 0x11,
            0, 9, 9,
        ];
        let (mut seen, mut number, mut text) = (Vec::new(), 0, &b""[..]);
        let mut thrift = Thrift::new(&bytes);
        thrift
            .structure(&mut |id, kind, thrift| {
                seen.push(id);
                match (id, kind) {
                    (1, Kind::Int) => number = thrift.int()?,
                    (4, Kind::Binary) => text = thrift.binary()?,
                    _ => return Ok(false),
                }
                Ok(true)
            })
            .unwrap();
        assert_eq!((seen, number, text, thrift.left()), (vec![1, 2, 4, 40, 41], -3, &b"ab"[..], 2));
    }

    #[test]
    fn what_ends_early_or_nests_without_end_is_an_error() {
        let skip = |bytes: &[u8]| Thrift::new(bytes).structure(&mut |_, _, _| Ok(false));
        let bytes = [0x15, 5, 0x28, 2, b'a', b'b', 0x19, 0xf8, 2, 0, 1, b'x', 0];
        skip(&bytes).unwrap();
        for len in 0..bytes.len() {
            assert_eq!(skip(&bytes[..len]).unwrap_err(), ENDS, "{len}");
        }
        assert!(skip(&[0x1c; 1000]).unwrap_err().contains("deeply"));
        assert!(
            skip(&[0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).is_err()
        );
        assert!(skip(&[0x1d]).unwrap_err().contains("unknown type 13"));
    }
}
