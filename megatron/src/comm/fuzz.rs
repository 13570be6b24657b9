//! Access to the private message parsers, for fuzzing (`tests/fuzz`).

use std::io::{self, Read, Write};

use super::message::{Call, Header, Op};
use super::rendezvous::wire;
use super::secret::{self, Secret};

/// An encoded header.
pub fn header() -> Vec<u8> {
    Header { group: 1, phase: 0, call: Call::new(Op::AllReduce), len: 8 }.encode().to_vec()
}

/// Decodes and formats consecutive headers.
pub fn headers(bytes: &[u8]) {
    for bytes in bytes.as_chunks::<{ Header::BYTES }>().0 {
        if let Ok(header) = Header::decode(bytes) {
            // The uses of a header in a receiver.
            let _ = (header.call.to_string(), header.call.same_elements(&Call::new(Op::Split)));
        }
    }
}

/// Reads a store's greeting, the proofs of both sides, and a request and a reply from the rest of
/// the bytes.
pub fn store_messages(mut bytes: &[u8]) {
    if wire::read_greeting(&mut bytes).is_ok() {
        let none = Secret::default();
        let mut said = Said(bytes);
        let _ =
            secret::introduce(&mut said, &none, wire::GREETING, |_| Ok(wire::GREETING.to_vec()));
        let greeting = || Ok((wire::GREETING.to_vec(), wire::GREETING.to_vec()));
        let mut said = Said(bytes);
        let _ = secret::answer(&mut said, &none, |_| greeting())
            .and_then(|a| a.recognize(&mut said, &none));
        let _ = wire::read_request(&mut &*bytes);
        let _ = wire::read_reply(&mut bytes);
    }
}

/// A peer that has sent these bytes and ignores what it receives.
struct Said<'a>(&'a [u8]);

impl Read for Said<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Said<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
