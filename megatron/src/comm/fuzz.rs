//! What reads messages and is not public, for fuzzing (`tests/fuzz`).

use super::message::{Call, Header, Op};
use super::rendezvous::wire;

/// An encoded header.
pub fn header() -> Vec<u8> {
    Header { group: 1, phase: 0, call: Call::new(Op::AllReduce), len: 8 }.encode().to_vec()
}

/// Reads headers, one after another, and says what they say.
pub fn headers(bytes: &[u8]) {
    for bytes in bytes.as_chunks::<{ Header::BYTES }>().0 {
        if let Ok(header) = Header::decode(bytes) {
            // What a receiver compares and prints.
            let _ = (header.call.to_string(), header.call.same_elements(&Call::new(Op::Split)));
        }
    }
}

/// Reads a store's greeting, and a request and a reply in what follows.
pub fn store_messages(mut bytes: &[u8]) {
    if wire::read_greeting(&mut bytes).is_ok() {
        let _ = wire::read_request(&mut &*bytes);
        let _ = wire::read_reply(&mut bytes);
    }
}
