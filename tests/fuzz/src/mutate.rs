//! Random mutations of inputs.

/// Maximum length of inputs.
pub const LONGEST: usize = 1 << 16;

/// xorshift64* (Vigna 2016).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below a power of two up to `1 << most`. Every number of bits is equally likely.
    fn small(&mut self, most: usize) -> usize {
        let bits = self.below(most);
        self.below(1 << bits)
    }

    /// A number below `bound`, or 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 16) as usize % bound.max(1)
    }
}

/// Numbers that often cause errors.
const NUMBERS: [u64; 14] = [
    0,
    1,
    7,
    8,
    255,
    256,
    1 << 15,
    u16::MAX as u64,
    1 << 31,
    u32::MAX as u64,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 7,
    u64::MAX,
];
const TEXTS: [&str; 16] = [
    "-1",
    "0",
    "1e999",
    "9223372036854775808",
    "18446744073709551616",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "../",
    "/",
    "\\u0000",
    "\"",
    "0.5",
    "4294967295",
];

/// Changes `bytes` in one or a few places. `other` is an input to take parts from; `words` are
/// meaningful to the target.
pub fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8], words: &[&str]) {
    for _ in 0..1 + random.small(4) {
        let at = random.below(bytes.len());
        let upto = (at + 1 + random.small(8)).min(bytes.len());
        match random.below(11) {
            0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            2 if !bytes.is_empty() => bytes[at] = random.next() as u8,
            3 => drop(bytes.drain(at..upto)),
            4 => {
                let part = bytes[at.min(upto)..upto].to_vec();
                insert(bytes, random, &part);
            }
            5 => {
                let from = random.below(other.len());
                let to = (from + 1 + random.below(64)).min(other.len());
                insert(bytes, random, &other[from.min(to)..to]);
            }
            6 | 7 => {
                let number = NUMBERS[random.below(NUMBERS.len())]
                    .wrapping_add(random.below(3) as u64)
                    .wrapping_sub(1);
                let number = number.to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at.min(bytes.len()));
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            8 => digits(bytes, at, random),
            9 if !words.is_empty() => {
                let word = words[random.below(words.len())];
                insert(bytes, random, word.as_bytes());
            }
            10 if random.below(8) == 0 => bytes.truncate(at),
            _ => {
                let text = TEXTS[random.below(TEXTS.len())];
                insert(bytes, random, text.as_bytes());
            }
        }
    }
    bytes.truncate(LONGEST);
}

fn insert(bytes: &mut Vec<u8>, random: &mut Random, part: &[u8]) {
    let at = random.below(bytes.len() + 1);
    let replaced = if random.below(2) == 0 { part.len().min(bytes.len() - at) } else { 0 };
    bytes.splice(at..at + replaced, part.iter().copied());
}

/// Replaces the next number or word in the text.
fn digits(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let is_part = |b: &u8| b.is_ascii_alphanumeric() || *b == b'.' || *b == b'-';
    let Some(start) =
        bytes[at.min(bytes.len())..].iter().position(u8::is_ascii_digit).map(|i| at + i)
    else {
        return;
    };
    let end =
        bytes[start..].iter().position(|b| !is_part(b)).map_or(bytes.len(), |len| start + len);
    bytes.splice(start..end, TEXTS[random.below(TEXTS.len())].bytes());
}
