//! The store's protocol: requests and replies. Every length has a limit.
//!
//! A connection starts with [`GREETING`] from both sides, each followed by the proof that both
//! belong to one run ([`super::super::secret`]). A request is an operation, a key (u16 length) and
//! a value (u32 length); a reply is a status and a value. Integers are little-endian.

use std::io::{self, Read, Write};

/// The first bytes from both sides; other bytes mean another program.
pub(in crate::comm) const GREETING: &[u8; 8] = b"MGTSTOR2";
/// Sent instead of the greeting by a store that has no room for another client.
pub(in crate::comm) const FULL: &[u8; 8] = b"MGTFULL1";
/// Sent by a store to an authenticated client, which it will not close for a stranger.
pub(in crate::comm) const WELCOME: u8 = 0x5a;
/// Longest key in bytes.
pub(in crate::comm) const MAX_KEY: usize = 1024;
/// Longest value in bytes.
pub(in crate::comm) const MAX_VALUE: usize = 1 << 20;

pub(in crate::comm) const SET: u8 = 1;
pub(in crate::comm) const GET: u8 = 2;
/// Value of the request: an i64.
pub(in crate::comm) const ADD: u8 = 3;
pub(in crate::comm) const LIST: u8 = 4;
/// Value of the request: the milliseconds to wait, u32.
pub(in crate::comm) const WAIT: u8 = 5;
/// The store is no longer needed.
pub(in crate::comm) const CLOSE: u8 = 6;

pub(in crate::comm) const OK: u8 = 0;
pub(in crate::comm) const NONE: u8 = 1;
pub(in crate::comm) const REFUSED: u8 = 2;

pub(in crate::comm) struct Request {
    pub operation: u8,
    pub key: String,
    pub value: Vec<u8>,
}

fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

fn read_array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn read_bytes(from: &mut impl Read, len: usize, most: usize) -> io::Result<Vec<u8>> {
    if len > most {
        return Err(invalid(format!("{len} bytes, but at most {most} are allowed")));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

pub(in crate::comm) fn read_greeting(from: &mut impl Read) -> io::Result<()> {
    match &read_array::<8>(from)? {
        GREETING => Ok(()),
        FULL => {
            Err(io::Error::new(io::ErrorKind::QuotaExceeded, "it cannot take another connection"))
        }
        _ => Err(invalid("it is another program")),
    }
}

pub(in crate::comm) fn write_request(to: &mut impl Write, request: &Request) -> io::Result<()> {
    let Request { operation, key, value } = request;
    if key.len() > MAX_KEY || value.len() > MAX_VALUE {
        return Err(invalid(format!(
            "key of {} or value of {} bytes is too long",
            key.len(),
            value.len()
        )));
    }
    let mut bytes = vec![*operation];
    bytes.extend_from_slice(&(key.len() as u16).to_le_bytes());
    bytes.extend_from_slice(key.as_bytes());
    bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
    bytes.extend_from_slice(value);
    to.write_all(&bytes)
}

pub(in crate::comm) fn read_request(from: &mut impl Read) -> io::Result<Request> {
    let [operation] = read_array(from)?;
    let len = usize::from(u16::from_le_bytes(read_array(from)?));
    let key =
        String::from_utf8(read_bytes(from, len, MAX_KEY)?).map_err(|e| invalid(e.to_string()))?;
    let len = u32::from_le_bytes(read_array(from)?) as usize;
    Ok(Request { operation, key, value: read_bytes(from, len, MAX_VALUE)? })
}

pub(in crate::comm) fn write_reply(
    to: &mut impl Write,
    status: u8,
    value: &[u8],
) -> io::Result<()> {
    let mut bytes = vec![status];
    bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
    bytes.extend_from_slice(value);
    to.write_all(&bytes)
}

pub(in crate::comm) fn read_reply(from: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let [status] = read_array(from)?;
    let len = u32::from_le_bytes(read_array(from)?) as usize;
    // A list of keys may be longer than any one value.
    Ok((status, read_bytes(from, len, 64 * MAX_VALUE)?))
}
