//! Access to the memory of other processes of this host (`process_vm_readv(2)`,
//! `process_vm_writev(2)`).
//!
//! The system allows it between processes of the same user in the same container. If it is not
//! allowed, [`Windows`](super::Windows) are used instead.
#![allow(unsafe_code)]

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Whether the members of a group can access each other's memory.
#[derive(Clone, Default)]
pub enum Reach {
    /// Not tried yet.
    #[default]
    Unknown,
    /// At least one member cannot.
    No,
    /// All can; the members' process ids.
    Yes(Arc<[u32]>),
}

/// A random number that other processes read, and write back unchanged, to verify that they access
/// the memory of this process.
static SECRET: OnceLock<AtomicU64> = OnceLock::new();

/// A process and the address of a number in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub pid: u32,
    address: u64,
    secret: u64,
}

impl Mark {
    pub const BYTES: usize = 24;

    /// The mark of this process. Allows other processes of the same user to access its memory.
    pub fn this() -> Self {
        // This matters, and can succeed, only if Linux's Yama restricts access.
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

    /// Whether this process can access the memory of the marked process.
    pub fn is_in_reach(self) -> bool {
        let mut there = [0; 8];
        read(self.pid, self.address, &mut there).is_ok()
            && u64::from_ne_bytes(there) == self.secret
            // SAFETY: at this address the process has the atomic number of its mark, and the write
            // does not change its value.
            && unsafe { write(self.pid, self.address, &there) }.is_ok()
    }
}

/// Copies `out.len()` bytes from `address` of process `pid`, which may be this one.
///
/// # Errors
/// If the process is gone, has no such memory, or does not allow access.
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
/// Nothing else may access that memory during the call, and the process must have reserved it for
/// this purpose.
pub unsafe fn write(pid: u32, address: u64, bytes: &[u8]) -> Result<()> {
    // SAFETY: the caller's promise; `bytes` are only read.
    unsafe { transfer(Direction::There, pid, address, bytes.as_ptr().cast_mut(), bytes.len()) }
}

/// The direction of a transfer.
enum Direction {
    Here,
    There,
}

/// Copies `len` bytes between `here` and `there` of process `pid`.
///
/// # Safety
/// The caller must own the bytes at `here` for reading, or for writing if they are the destination.
/// The same holds for the bytes in the other process.
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
        // SAFETY: `done` is less than `len`.
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

/// Not supported on this system.
///
/// # Errors
/// Always.
///
/// # Safety
/// As on Linux.
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
        // No system has this many processes.
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
