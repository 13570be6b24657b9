//! The bytes of an event file: TFRecords of TensorFlow's `Event` messages.
//!
//! Formats: `tensorflow/core/lib/io/record_writer.h`, `tensorflow/core/util/event.proto`,
//! `tensorflow/core/framework/summary.proto`. About a dozen of their fields are used, so no
//! protobuf compiler is needed.

use std::io::{Result, Write};

/// The format version, stored in the first record of a file.
const FILE_VERSION: &str = "brain.Event:2";

/// A record of an event file.
#[derive(Clone, Debug)]
pub struct Event<'a> {
    /// Seconds since 1970.
    pub wall_time: f64,
    /// Position on the axis of steps.
    pub step: u64,
    pub what: What<'a>,
}

/// The content of an [`Event`].
#[derive(Clone, Debug)]
pub enum What<'a> {
    /// The file's format.
    FileVersion,
    /// A run starts or resumes here. Readers drop earlier values of this and later steps.
    SessionStart,
    /// One value for each of these curves.
    Scalars(&'a [(&'a str, f64)]),
}

impl Event<'_> {
    /// Encodes the event as a protobuf message.
    pub fn encode(&self) -> Vec<u8> {
        let mut message = Message::default();
        message.fixed64(1, self.wall_time.to_bits());
        // Protobuf omits fields that are 0.
        if self.step > 0 {
            message.varint(2, self.step);
        }
        match self.what {
            What::FileVersion => message.bytes(3, FILE_VERSION.as_bytes()),
            What::Scalars(values) => message.bytes(5, &summary(values)),
            What::SessionStart => {
                const START: u64 = 1;
                let mut session_log = Message::default();
                session_log.varint(1, START);
                message.bytes(7, &session_log.0);
            }
        }
        message.0
    }
}

fn summary(values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Message::default();
    for (tag, value) in values {
        let mut one = Message::default();
        one.bytes(1, tag.as_bytes());
        one.fixed32(2, simple_value(*value).to_bits());
        summary.bytes(1, &one.0);
    }
    summary.0
}

/// Curves store f32. TensorBoard can mark NaN, but it cannot place infinity on an axis; infinity
/// becomes NaN.
fn simple_value(value: f64) -> f32 {
    let value = value as f32;
    if value.is_finite() { value } else { f32::NAN }
}

/// A protobuf message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u64, wire_type: u64) {
        self.number(field << 3 | wire_type);
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn varint(&mut self, field: u64, number: u64) {
        self.key(field, 0);
        self.number(number);
    }

    fn fixed64(&mut self, field: u64, bits: u64) {
        self.key(field, 1);
        self.0.extend(bits.to_le_bytes());
    }

    fn fixed32(&mut self, field: u64, bits: u32) {
        self.key(field, 5);
        self.0.extend(bits.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, 2);
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

/// Writes a TFRecord: the length, the data, and a checksum of each.
pub fn write_record(out: &mut impl Write, data: &[u8]) -> Result<()> {
    let length = (data.len() as u64).to_le_bytes();
    out.write_all(&length)?;
    out.write_all(&masked_crc(&length).to_le_bytes())?;
    out.write_all(data)?;
    out.write_all(&masked_crc(data).to_le_bytes())
}

/// CRC-32C, masked so that a checksum over data that contain checksums is still reliable.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Case {
        wall_time: f64,
        step: u64,
        what: String,
        /// Numbers in Python's notation, because JSON has no NaN.
        scalars: Vec<(String, String)>,
        record: String,
    }

    #[test]
    fn records_are_those_of_tensorboard_byte_for_byte() {
        let cases: Vec<Case> =
            serde_json::from_str(include_str!("../../../tests/fixtures/tensorboard.json")).unwrap();
        assert!(cases.len() > 5);
        for case in cases {
            let scalars: Vec<(&str, f64)> = case
                .scalars
                .iter()
                .map(|(tag, value)| (tag.as_str(), value.parse().unwrap()))
                .collect();
            let what = match case.what.as_str() {
                "file_version" => What::FileVersion,
                "session_start" => What::SessionStart,
                _ => What::Scalars(&scalars),
            };
            let mut record = Vec::new();
            let event = Event { wall_time: case.wall_time, step: case.step, what };
            write_record(&mut record, &event.encode()).unwrap();
            let hex: String = record.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, case.record, "{event:?}");
        }
    }

    #[test]
    fn what_an_axis_has_no_place_for_is_not_a_number() {
        for value in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e300] {
            assert!(simple_value(value).is_nan(), "{value}");
        }
        assert_eq!(
            [simple_value(0.1), simple_value(-3e38), simple_value(1e-300)],
            [0.1, -3e38, 0.0]
        );
    }
}
