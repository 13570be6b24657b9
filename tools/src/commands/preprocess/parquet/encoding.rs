//! Decodes byte strings and levels: bit-packed numbers, runs, differences and dictionaries.
//!
//! Source: parquet-format, `Encodings.md`. Values are decoded on demand, so that false counts cost
//! no memory.

use super::Read;

const ENDS: &str = "a page ends too early";

fn unsigned(bytes: &[u8], at: &mut usize) -> Read<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at).ok_or(ENDS)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a number in a page has more than 64 bits".into())
}

fn signed(bytes: &[u8], at: &mut usize) -> Read<i64> {
    let value = unsigned(bytes, at)?;
    Ok((value >> 1) as i64 ^ -((value & 1) as i64))
}

/// The number of `width` bits, at most 64, that starts at bit `bit` of `bytes`, lowest bit first.
fn bits(bytes: &[u8], bit: usize, width: u32) -> Read<u64> {
    let (first, last) = (bit / 8, (bit + width as usize).div_ceil(8));
    let held = bytes.get(first..last).ok_or(ENDS)?;
    let mut wide = [0; 16];
    wide[..held.len()].copy_from_slice(held); // 9 bytes at most
    let value = (u128::from_le_bytes(wide) >> (bit % 8)) as u64;
    Ok(if width == 64 { value } else { value & ((1 << width) - 1) })
}

/// Levels and indices: runs of one value, and groups of 8 packed values (`RLE`).
#[derive(Debug)]
pub struct Hybrid {
    /// Position of the next run, and end of the runs.
    at: usize,
    end: usize,
    width: u32,
    run: Run,
}

#[derive(Debug)]
enum Run {
    Repeated { value: u32, left: u64 },
    Packed { bit: usize, left: u64 },
}

impl Hybrid {
    /// The runs in bytes `at..end` of a page, of values of `width` bits.
    pub fn new(at: usize, end: usize, width: u32) -> Read<Self> {
        match width {
            0..=32 => Ok(Self { at, end, width, run: Run::Repeated { value: 0, left: 0 } }),
            _ => Err(format!("a page has indices of {width} bits")),
        }
    }

    pub fn next(&mut self, page: &[u8]) -> Read<u32> {
        let page = page.get(..self.end).ok_or(ENDS)?;
        loop {
            match &mut self.run {
                Run::Repeated { value, left } if *left > 0 => {
                    *left -= 1;
                    return Ok(*value);
                }
                Run::Packed { bit, left } if *left > 0 => {
                    let value = bits(page, *bit, self.width)? as u32;
                    *bit += self.width as usize;
                    *left -= 1;
                    return Ok(value);
                }
                _ => self.begin(page)?,
            }
        }
    }

    fn begin(&mut self, page: &[u8]) -> Read<()> {
        let head = unsigned(page, &mut self.at)?;
        let count = head >> 1;
        let bytes = if head & 1 == 0 {
            self.width.div_ceil(8).into()
        } else {
            count.saturating_mul(self.width.into())
        };
        let from = self.at;
        self.at =
            usize::try_from(bytes).ok().and_then(|bytes| from.checked_add(bytes)).ok_or(ENDS)?;
        if self.at > page.len() {
            return Err(ENDS.into());
        }
        self.run = if head & 1 == 0 {
            Run::Repeated {
                value: bits(page, from * 8, self.width.div_ceil(8) * 8)? as u32,
                left: count,
            }
        } else {
            Run::Packed { bit: from * 8, left: count.saturating_mul(8) }
        };
        Ok(())
    }
}

/// Integers as packed differences (`DELTA_BINARY_PACKED`).
#[derive(Clone, Debug)]
struct Deltas {
    /// Position of the next block, or of the packed numbers of the current one.
    at: usize,
    /// Differences per part of a block, and parts per block.
    per_part: usize,
    parts: usize,
    /// Values that are not yet decoded.
    left: u64,
    value: i64,
    first: bool,
    least: i64,
    /// Position of the widths of the current block's parts, the part, and the place in it.
    widths: usize,
    part: usize,
    within: usize,
}

impl Deltas {
    fn new(page: &[u8], mut at: usize) -> Read<Self> {
        let per_block = unsigned(page, &mut at)?;
        let parts = unsigned(page, &mut at)?;
        let left = unsigned(page, &mut at)?;
        let value = signed(page, &mut at)?;
        let fits =
            (1..=1 << 20).contains(&per_block) && parts > 0 && per_block.is_multiple_of(parts);
        let per_part = if fits { (per_block / parts) as usize } else { 0 };
        if per_part == 0 || !per_part.is_multiple_of(8) {
            return Err(format!("a page has blocks of {per_block} differences in {parts} parts"));
        }
        let parts = parts as usize;
        Ok(Self {
            at,
            per_part,
            parts,
            left,
            value,
            first: true,
            least: 0,
            widths: 0,
            part: parts,
            within: per_part,
        })
    }

    fn width(&self, page: &[u8]) -> Read<u32> {
        match page.get(self.widths + self.part).ok_or(ENDS)? {
            width @ 0..=64 => Ok(u32::from(*width)),
            width => Err(format!("a page has differences of {width} bits")),
        }
    }

    /// Goes to the part that holds the next difference.
    fn advance(&mut self, page: &[u8]) -> Read<()> {
        if self.part < self.parts {
            self.at += self.width(page)? as usize * self.per_part / 8;
            self.part += 1;
        }
        if self.part >= self.parts {
            self.least = signed(page, &mut self.at)?;
            self.widths = self.at;
            self.at = self.at.checked_add(self.parts).filter(|&at| at <= page.len()).ok_or(ENDS)?;
            self.part = 0;
        }
        self.within = 0;
        Ok(())
    }

    fn next(&mut self, page: &[u8]) -> Read<i64> {
        self.left = self.left.checked_sub(1).ok_or(ENDS)?;
        if std::mem::take(&mut self.first) {
            return Ok(self.value);
        }
        if self.within == self.per_part {
            self.advance(page)?;
        }
        let width = self.width(page)?;
        let delta = bits(page, self.at * 8 + self.within * width as usize, width)?;
        self.within += 1;
        self.value = self.value.wrapping_add(self.least).wrapping_add(delta as i64);
        Ok(self.value)
    }

    /// End of the last block. Its empty parts are not stored.
    fn end(&self, page: &[u8]) -> Read<usize> {
        let mut rest = self.clone();
        let mut left = rest.left.saturating_sub(1);
        while left > 0 {
            rest.advance(page)?;
            left = left.saturating_sub(rest.per_part as u64);
        }
        if rest.part < rest.parts {
            rest.at += rest.width(page)? as usize * rest.per_part / 8;
        }
        Ok(rest.at)
    }
}

/// The byte strings of a page, one after another.
#[derive(Debug)]
pub struct Strings(Encoding);

#[derive(Debug)]
enum Encoding {
    Plain { at: usize },
    Indices(Hybrid),
    Lengths { lengths: Deltas, at: usize },
    Prefixes { prefixes: Deltas, suffixes: Deltas, at: usize, last: Vec<u8> },
}

/// The strings of a dictionary.
#[derive(Debug, Default)]
pub struct Dictionary {
    page: Vec<u8>,
    /// Start and end of each string.
    places: Vec<(u32, u32)>,
}

impl Dictionary {
    /// A dictionary of `count` strings that a page lists.
    pub fn new(page: Vec<u8>, count: u32) -> Read<Self> {
        let (mut places, mut at) = (Vec::new(), 0);
        for _ in 0..count {
            let place = plain(&page, &mut at)?;
            places.push((place.start as u32, place.end as u32));
        }
        Ok(Self { page, places })
    }
}

/// The position of a string, after its length.
fn plain(page: &[u8], at: &mut usize) -> Read<std::ops::Range<usize>> {
    let start = at.checked_add(4).ok_or(ENDS)?;
    let len = page.get(*at..start).ok_or(ENDS)?;
    let len = u32::from_le_bytes([len[0], len[1], len[2], len[3]]) as usize;
    let end = start.checked_add(len).filter(|&end| end <= page.len()).ok_or(ENDS)?;
    *at = end;
    Ok(start..end)
}

fn size(value: i64) -> Read<usize> {
    usize::try_from(value).map_err(|_| format!("a page has a string of {value} bytes"))
}

/// `len` bytes of the page from `at` on; moves `at` past them.
fn part<'a>(page: &'a [u8], at: &mut usize, len: usize) -> Read<&'a [u8]> {
    let part = at.checked_add(len).and_then(|end| page.get(*at..end)).ok_or(ENDS)?;
    *at += len;
    Ok(part)
}

impl Strings {
    /// The strings of a page from byte `at` on, in the encoding with this number.
    pub fn new(page: &[u8], at: usize, encoding: i64, has_dictionary: bool) -> Read<Self> {
        Ok(Self(match encoding {
            // All values are null.
            _ if at >= page.len() => Encoding::Plain { at },
            0 => Encoding::Plain { at },
            2 | 8 if has_dictionary => {
                Encoding::Indices(Hybrid::new(at + 1, page.len(), u32::from(page[at]))?)
            }
            2 | 8 => return Err("a page refers to a missing dictionary".into()),
            6 => {
                let lengths = Deltas::new(page, at)?;
                let at = lengths.end(page)?;
                Encoding::Lengths { lengths, at }
            }
            7 => {
                let prefixes = Deltas::new(page, at)?;
                let suffixes = Deltas::new(page, prefixes.end(page)?)?;
                let at = suffixes.end(page)?;
                Encoding::Prefixes { prefixes, suffixes, at, last: Vec::new() }
            }
            _ => {
                return Err(format!(
                    "a page has the encoding {encoding}, which strings do not have"
                ));
            }
        }))
    }

    pub fn next<'a>(&'a mut self, page: &'a [u8], dictionary: &'a Dictionary) -> Read<&'a [u8]> {
        match &mut self.0 {
            Encoding::Plain { at } => plain(page, at).map(|place| &page[place]),
            Encoding::Indices(indices) => {
                let index = indices.next(page)?;
                let place = dictionary.places.get(index as usize);
                let &(start, end) = place.ok_or_else(|| {
                    format!("a page refers to entry {index} of a shorter dictionary")
                })?;
                Ok(&dictionary.page[start as usize..end as usize])
            }
            Encoding::Lengths { lengths, at } => part(page, at, size(lengths.next(page)?)?),
            Encoding::Prefixes { prefixes, suffixes, at, last } => {
                let prefix = size(prefixes.next(page)?)?;
                let suffix = part(page, at, size(suffixes.next(page)?)?)?;
                if prefix > last.len() {
                    return Err(format!(
                        "a string takes {prefix} bytes from a string of {} bytes",
                        last.len()
                    ));
                }
                last.truncate(prefix);
                last.extend_from_slice(suffix);
                Ok(last)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the format's description: 0 to 7 packed in 3 bits; and a run of 4 fives.
    #[test]
    fn runs_and_packed_groups_follow_one_another() {
        let page = [3, 0x88, 0xc6, 0xfa, 8, 5];
        let mut levels = Hybrid::new(0, 6, 3).unwrap();
        let values: Vec<u32> = (0..12).map(|_| levels.next(&page).unwrap()).collect();
        assert_eq!(values, [0, 1, 2, 3, 4, 5, 6, 7, 5, 5, 5, 5]);
        assert!(levels.next(&page).is_err());
        assert!(
            Hybrid::new(0, 6, 33).is_err() && Hybrid::new(0, 9, 3).unwrap().next(&page).is_err()
        );
    }

    /// The examples of the format's description: 1 2 3 4 5 and 7 5 3 1 2 3 4 5, here in blocks of
    /// 128 in 4 parts.
    #[test]
    fn differences_add_up() {
        let page = [0x80, 1, 4, 5, 2, 2, 0, 0, 0, 0, 99];
        let mut deltas = Deltas::new(&page, 0).unwrap();
        assert_eq!(deltas.end(&page).unwrap(), 10);
        assert_eq!(
            (0..5).map(|_| deltas.next(&page).unwrap()).collect::<Vec<_>>(),
            [1, 2, 3, 4, 5]
        );
        assert!(deltas.next(&page).is_err());
        let page = [0x80, 1, 4, 8, 14, 3, 2, 0, 0, 0, 0xc0, 0x3f, 0, 0, 0, 0, 0, 0];
        let mut deltas = Deltas::new(&page, 0).unwrap();
        assert_eq!(deltas.end(&page).unwrap(), 18);
        assert_eq!(
            (0..8).map(|_| deltas.next(&page).unwrap()).collect::<Vec<_>>(),
            [7, 5, 3, 1, 2, 3, 4, 5]
        );
    }

    #[test]
    fn shapes_of_blocks_that_cannot_be_are_refused() {
        for page in
            [&[0, 4, 1, 0][..], &[0x80, 1, 0, 1, 0], &[0x80, 1, 3, 1, 0], &[8, 2, 1, 0], &[0x80]]
        {
            assert!(Deltas::new(page, 0).is_err(), "{page:?}");
        }
    }
}
