//! Reading and writing the memory of other processes of this host (`process_vm_readv(2)`,
//! `process_vm_writev(2)`).
//!
//! The system allows it to processes of the same user, in the same container; where it does not,
//! [`Windows`](super::Windows) serve.
#![allow(unsafe_code)]

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Whether the members of a group can read and write each other's memory.
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

/// What others read, and write again as it is, to make sure that it is this process whose memory
/// they reach.
static SECRET: OnceLock<AtomicU64> = OnceLock::new();

/// A process and a number in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub pid: u32,
    address: u64,
    secret: u64,
}

impl Mark {
    pub const BYTES: usize = 24;

    /// This process's; lets others of the same user reach its memory.
    pub fn this() -> Self {
        // Only where Linux's Yama restricts it does this matter or succeed.
        // SAFETY: sets a property of the process, without pointers.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0);
        }
        let secret =
            SECRET.get_or_init(|| AtomicU64::new(RandomState::new().build_hasher().finish()));
        let address = secret.as_ptr().addr() as u64;
        Self { pid: std::process::id(), address, secret: secret.load(Ordering::Relaxed) }
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

    /// Whether this process can read and write that one's memory.
    pub fn is_in_reach(self) -> bool {
        let mut there = [0; 8];
        read(self.pid, self.address, &mut there).is_ok()
            && u64::from_ne_bytes(there) == self.secret
            // SAFETY: that process has its mark's number there, an atomic one, which stays what it
            // is.
            && unsafe { write(self.pid, self.address, &there) }.is_ok()
    }
}

/// Copies `out.len()` bytes from `address` of process `pid`, which may be this one.
///
/// # Errors
/// If the process is gone, has no such memory, or keeps it to itself.
pub fn read(pid: u32, address: u64, out: &mut [u8]) -> Result<()> {
    // SAFETY: `out` is this call's to write to.
    unsafe { transfer(Direction::Here, pid, address, out.as_mut_ptr(), out.len()) }
}

/// Copies `bytes` to `address` of process `pid`, which may be this one.
///
/// # Errors
/// As [`read`].
///
/// # Safety
/// Nobody may read or write there meanwhile, and that process must have kept the memory for this.
pub unsafe fn write(pid: u32, address: u64, bytes: &[u8]) -> Result<()> {
    // SAFETY: the caller's promise; `bytes` are only read.
    unsafe { transfer(Direction::There, pid, address, bytes.as_ptr().cast_mut(), bytes.len()) }
}

/// Which way bytes go.
enum Direction {
    Here,
    There,
}

/// Copies `len` bytes between `here` and `there` of process `pid`.
///
/// # Safety
/// The bytes at `here` must be the caller's to read, or to write where they are copied here; those
/// of the other process are as much its own.
#[cfg(target_os = "linux")]
unsafe fn transfer(
    direction: Direction,
    pid: u32,
    there: u64,
    here: *mut u8,
    len: usize,
) -> Result<()> {
    let call = match direction {
        Direction::Here => libc::process_vm_readv,
        Direction::There => libc::process_vm_writev,
    };
    let mut done = 0;
    while done < len {
        // SAFETY: `done` is less than the bytes there are.
        let local = libc::iovec { iov_base: unsafe { here.add(done) }.cast(), iov_len: len - done };
        let there = std::ptr::without_provenance_mut(there as usize + done);
        let remote = libc::iovec { iov_base: there, iov_len: len - done };
        // SAFETY: the caller's promise; the kernel checks the address.
        match unsafe { call(pid.cast_signed(), &raw const local, 1, &raw const remote, 1, 0) } {
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
///
/// # Safety
/// As there.
#[cfg(not(target_os = "linux"))]
unsafe fn transfer(
    _: Direction,
    _pid: u32,
    _there: u64,
    _here: *mut u8,
    _len: usize,
) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_and_of_no_other_is_found_by_its_mark() {
        let mark = Mark::this();
        assert_eq!(Mark::decode(&mark.encode()), Some(mark));
        assert!(mark.is_in_reach());
        assert!(!Mark { secret: !mark.secret, ..mark }.is_in_reach());
        assert!(!Mark { address: 8, ..mark }.is_in_reach());
        // No system has so many processes.
        assert!(!Mark { pid: i32::MAX as u32, ..mark }.is_in_reach());
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let bytes = [1, 2, 3];
        let address = bytes.as_ptr().addr() as u64;
        let mut out = [0; 3];
        read(std::process::id(), address, &mut out).unwrap();
        assert_eq!(out, bytes);
        assert!(read(std::process::id(), 0, &mut out).is_err());
        // SAFETY: no process has memory there.
        assert!(unsafe { write(std::process::id(), 0, &bytes) }.is_err());
    }
}
