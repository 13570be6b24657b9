//! CUDA libraries, loaded at their first call. A program that calls none runs without them.
//!
//! The build script defines each of their functions as a jump through a table (`libraries.s`). Each
//! entry leads here at first. If a library is missing, its functions return the library's status
//! for that case. Code that opens a GPU asks [`missing`] before, and reports the missing files.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

include!(concat!(env!("OUT_DIR"), "/libraries.rs"));

std::arch::global_asm!(include_str!(concat!(env!("OUT_DIR"), "/libraries.s")), options(att_syntax));

unsafe extern "C" {
    /// As many entries as [`FUNCTIONS`].
    static gpu_library_entries: [AtomicPtr<c_void>; 1];
}

/// A library and its state.
pub struct Library {
    name: &'static str,
    soname: &'static CStr,
    /// Status that its functions return if the library is missing.
    status: c_int,
    handle: AtomicPtr<c_void>,
    /// 0: not searched yet; 1: found; 2: missing.
    state: AtomicU8,
}

impl Library {
    const fn new(name: &'static str, soname: &'static CStr, status: c_int) -> Self {
        Self {
            name,
            soname,
            status,
            handle: AtomicPtr::new(std::ptr::null_mut()),
            state: AtomicU8::new(0),
        }
    }

    /// The library's handle; null if it is missing.
    fn open(&self) -> *mut c_void {
        if self.state.load(Ordering::Acquire) == 0 {
            // cuBLAS loads cuBLASLt by a name that the loader may not find, even where it found
            // cuBLAS itself. So open cuBLASLt first.
            if self.name == "cublas" {
                LIBRARIES
                    .iter()
                    .filter(|library| library.name == "cublasLt")
                    .for_each(|library| _ = library.open());
            }
            // Two threads that search at once find the same library.
            let handle = self.search();
            self.handle.store(handle, Ordering::Relaxed);
            self.state.store(if handle.is_null() { 2 } else { 1 }, Ordering::Release);
        }
        self.handle.load(Ordering::Relaxed)
    }

    /// Searches the loader's paths, then the toolkit that the environment names, the one of the
    /// build, and the usual one.
    fn search(&self) -> *mut c_void {
        let open = |path: &CStr| {
            // SAFETY: a C string; these libraries' initializers do nothing that depends on this
            // program.
            unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) }
        };
        let handle = open(self.soname);
        if !handle.is_null() || self.name == "cuda" {
            // The driver comes from the system only; a toolkit contains just a stub of it.
            return handle;
        }
        // SAFETY: the value is copied before anything else runs here; this may run before `main`.
        let home = unsafe {
            let home = libc::getenv(c"CUDA_HOME".as_ptr());
            if home.is_null() { None } else { Some(CStr::from_ptr(home).to_owned()) }
        };
        let roots = [home.as_deref(), Some(TOOLKIT), Some(c"/usr/local/cuda")];
        for root in roots.into_iter().flatten() {
            // Folders of an installed toolkit, of conda packages, and of PyPI packages.
            for folder in [&b"/lib64/"[..], b"/lib/", b"/targets/x86_64-linux/lib/"] {
                let path = [root.to_bytes(), folder, self.soname.to_bytes()].concat();
                let handle = CString::new(path).map_or(std::ptr::null_mut(), |path| open(&path));
                if !handle.is_null() {
                    return handle;
                }
            }
        }
        std::ptr::null_mut()
    }
}

/// File names of the `wanted` libraries that are not on this machine.
pub fn missing(wanted: &[&str]) -> Vec<String> {
    let wanted = LIBRARIES.iter().filter(|library| wanted.contains(&library.name));
    wanted
        .filter(|library| library.open().is_null())
        .map(|l| l.soname.to_string_lossy().into_owned())
        .collect()
}

/// Finds function `index` and stores it in its entry. Returns the address to jump to.
#[unsafe(no_mangle)]
extern "C" fn kernels_gpu_library_resolve(index: usize) -> *mut c_void {
    let (library, name) = FUNCTIONS[index];
    let library = &LIBRARIES[library];
    let handle = library.open();
    let mut function = std::ptr::null_mut();
    if !handle.is_null() {
        // SAFETY: an open library and a C string.
        function = unsafe { libc::dlsym(handle, name.as_ptr().cast::<c_char>()) };
    }
    if function.is_null() {
        function = match library.status {
            1 => absent::<1> as *mut c_void,
            2 => absent::<2> as *mut c_void,
            11 => absent::<11> as *mut c_void,
            203 => absent::<203> as *mut c_void,
            _ => absent::<34> as *mut c_void,
        };
    }
    // SAFETY: `index` is that of an entry; the assembly numbers them by the same list.
    unsafe {
        (*(&raw const gpu_library_entries).cast::<AtomicPtr<c_void>>().add(index))
            .store(function, Ordering::Release)
    };
    function
}

/// Replaces functions of a missing library. It can ignore the arguments.
extern "C" fn absent<const STATUS: c_int>() -> c_int {
    STATUS
}
