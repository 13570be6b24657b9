//! Reading the memory of other processes of this host (`process_vm_readv(2)`).
//!
//! The system allows it to processes of the same user, in the same container; where it does not, [`Windows`](super::Windows) serve.
#![allow(unsafe_code)]

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Error, ErrorKind, Result};
use std::sync::{Arc, OnceLock};

/// Whether the members of a group can read each other's memory.
#[derive(Clone, Default)]
pub enum Reach {
    /// Nobody has tried.
    #[default]
    Unknown,
    /// At least one cannot.
    No,
    /// All can; the members' processes.
    Yes(Arc<[u32]>),
}

/// What others read to make sure that it is this process that they see.
static SECRET: OnceLock<u64> = OnceLock::new();

/// A process and a number in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub pid: u32,
    address: u64,
    secret: u64,
}

impl Mark {
    pub const BYTES: usize = 24;

    /// This process's; lets others of the same user read its memory.
    pub fn this() -> Self {
        // Only where Linux's Yama restricts it does this matter or succeed.
        // SAFETY: sets a property of the process, without pointers.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0);
        }
        let secret = SECRET.get_or_init(|| RandomState::new().build_hasher().finish());
        Self { pid: std::process::id(), address: std::ptr::from_ref(secret).addr() as u64, secret: *secret }
    }

    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&u64::from(self.pid).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        bytes[16..].copy_from_slice(&self.secret.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let word = |i: usize| Some(u64::from_le_bytes(*bytes[8 * i..].first_chunk()?));
        Some(Self { pid: word(0)?.try_into().ok()?, address: word(1)?, secret: word(2)? })
    }

    /// Whether this process can read that one's memory.
    pub fn is_readable(self) -> bool {
        let mut there = [0; 8];
        read(self.pid, self.address, &mut there).is_ok() && u64::from_le_bytes(there) == self.secret
    }
}

/// Copies `out.len()` bytes from `address` of process `pid`, which may be this one.
///
/// # Errors
/// If the process is gone, has no such memory, or keeps it to itself.
#[cfg(target_os = "linux")]
pub fn read(pid: u32, address: u64, out: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < out.len() {
        let left = &mut out[done..];
        let local = libc::iovec { iov_base: left.as_mut_ptr().cast(), iov_len: left.len() };
        let from = address as usize + done;
        let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(from), iov_len: left.len() };
        // SAFETY: `local` is memory that this call alone writes to; `remote` is an address of the other process, which the kernel checks.
        match unsafe { libc::process_vm_readv(pid.cast_signed(), &local, 1, &remote, 1, 0) } {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n if n > 0 => done += n as usize,
            _ => {
                let error = Error::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Not on this system.
///
/// # Errors
/// Always.
#[cfg(not(target_os = "linux"))]
pub fn read(_pid: u32, _address: u64, _out: &mut [u8]) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_and_of_no_other_is_found_by_its_mark() {
        let mark = Mark::this();
        assert_eq!(Mark::decode(&mark.encode()), Some(mark));
        assert!(mark.is_readable());
        assert!(!Mark { secret: !mark.secret, ..mark }.is_readable());
        assert!(!Mark { address: 8, ..mark }.is_readable());
        // No system has so many processes.
        assert!(!Mark { pid: i32::MAX as u32, ..mark }.is_readable());
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let bytes = [1, 2, 3];
        let address = bytes.as_ptr().addr() as u64;
        let mut out = [0; 3];
        read(std::process::id(), address, &mut out).unwrap();
        assert_eq!(out, bytes);
        assert!(read(std::process::id(), 0, &mut out).is_err());
    }
}
