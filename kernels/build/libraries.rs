//! CUDA libraries, loaded at their first call.
//!
//! If they were linked in the ordinary way, a program without one of them would not even start for
//! `--help`. So this file defines each of their functions as a jump through a table.
//! `tensor::gpu::libraries` fills the entries by `dlsym` at the first call. Nothing is left for the
//! libraries to resolve, so the linker (`--as-needed`) drops them.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

use crate::sources;

/// A library: its name, the prefixes of its functions, the headers that declare them, and the
/// status for a missing library (which its functions return, see `tensor::gpu::libraries`).
struct Library {
    name: &'static str,
    soname: fn(&str) -> String,
    prefixes: &'static [&'static str],
    headers: &'static [&'static str],
    status: i32,
}

const LIBRARIES: &[Library] = &[
    Library {
        name: "cuda",
        soname: |_| "libcuda.so.1".into(),
        prefixes: &["cu"],
        headers: &["cuda.h"],
        status: 34, // CUDA_ERROR_STUB_LIBRARY
    },
    Library {
        name: "cudart",
        soname: |major| format!("libcudart.so.{major}"),
        prefixes: &["cuda", "__cuda"],
        headers: &["cuda_runtime_api.h", "crt/host_runtime.h", "crt/device_functions.h"],
        status: 34, // cudaErrorStubLibrary
    },
    Library {
        name: "cublasLt",
        soname: |major| format!("libcublasLt.so.{major}"),
        prefixes: &["cublasLt"],
        headers: &["cublasLt.h"],
        status: 1, // CUBLAS_STATUS_NOT_INITIALIZED
    },
    Library {
        name: "cublas",
        soname: |major| format!("libcublas.so.{major}"),
        prefixes: &["cublas"],
        headers: &["cublas_api.h", "cublas_v2.h"],
        status: 1,
    },
    Library {
        name: "curand",
        soname: |_| "libcurand.so.10".into(),
        prefixes: &["curand"],
        headers: &["curand.h"],
        status: 203, // CURAND_STATUS_INITIALIZATION_FAILED
    },
    Library {
        name: "nvrtc",
        soname: |major| format!("libnvrtc.so.{major}"),
        prefixes: &["nvrtc"],
        headers: &["nvrtc.h"],
        status: 11, // NVRTC_ERROR_INTERNAL_ERROR
    },
    // NCCL's header is not needed to build: its functions are few.
    Library {
        name: "nccl",
        soname: |_| "libnccl.so.2".into(),
        prefixes: &["nccl"],
        headers: &[],
        status: 2,
    },
];

const NCCL: &[&str] = &[
    "ncclGetVersion",
    "ncclGetUniqueId",
    "ncclCommInitRank",
    "ncclCommInitRankConfig",
    "ncclCommInitAll",
    "ncclCommInitRankScalable",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclCommAbort",
    "ncclCommSplit",
    "ncclCommShrink",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclCommGetAsyncError",
    "ncclCommCount",
    "ncclCommCuDevice",
    "ncclCommUserRank",
    "ncclCommRegister",
    "ncclCommDeregister",
    "ncclCommWindowRegister",
    "ncclCommWindowDeregister",
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclReduce",
    "ncclBcast",
    "ncclBroadcast",
    "ncclAllReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclAlltoAll",
    "ncclGather",
    "ncclScatter",
    "ncclSend",
    "ncclRecv",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclGroupSimulateEnd",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
    "ncclResetDebugInit",
];

/// Writes the table in assembly (`libraries.s`) and in Rust (`libraries.rs`).
pub fn build(nvcc: &Path, version: &str) -> Result<(), String> {
    let include = include_dir(nvcc)?;
    let major =
        version.split("release ").nth(1).and_then(|rest| rest.split('.').next()).unwrap_or("13");
    let mut functions: Vec<(usize, String)> = Vec::new();
    let mut known = BTreeSet::new();
    for (at, library) in LIBRARIES.iter().enumerate() {
        let mut names: BTreeSet<String> = BTreeSet::new();
        if library.headers.is_empty() {
            names.extend(NCCL.iter().map(|name| name.to_string()));
        }
        for header in library.headers {
            let path = include.join(header);
            let text = fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            names.extend(functions_in(&String::from_utf8_lossy(&text), library.prefixes));
        }
        functions.extend(
            names.into_iter().filter(|name| known.insert(name.clone())).map(|name| (at, name)),
        );
    }
    // cudarc makes the linker look for NCCL, which need not be installed. An empty library (a
    // linker script without commands) satisfies it.
    write("libnccl.so", "/* empty */\n")?;
    println!("cargo::rustc-link-search=native={}", sources::out_dir().display());
    write("libraries.s", &assembly(&functions))?;
    write("libraries.rs", &table(&functions, major, &include))
}

/// The folder of headers of this nvcc's toolkit.
fn include_dir(nvcc: &Path) -> Result<PathBuf, String> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from);
    let on_path = env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect::<Vec<_>>())
        .unwrap_or_default();
    let beside = [nvcc.parent().map(Path::to_path_buf)].into_iter().flatten().chain(on_path);
    // From bin/nvcc to its toolkit.
    let beside = beside
        .filter(|bin| bin.join("nvcc").exists())
        .filter_map(|bin| Some(fs::canonicalize(bin).ok()?.parent()?.into()));
    let roots: Vec<PathBuf> = homes.chain(beside).collect();
    let candidates = roots
        .iter()
        .flat_map(|root| [root.join("include"), root.join("targets/x86_64-linux/include")]);
    let found = candidates
        .into_iter()
        .find(|dir| dir.join("cuda.h").exists() && dir.join("cublasLt.h").exists());
    found.ok_or_else(|| {
        format!(
            "found no cuda.h and cublasLt.h beside {} (roots: {roots:?}); set CUDA_HOME",
            nvcc.display()
        )
    })
}

/// Identifiers of a header that begin with a prefix and a capital letter. Types are included, which
/// does no harm.
fn functions_in<'a>(text: &'a str, prefixes: &'a [&str]) -> impl Iterator<Item = String> + use<'a> {
    let identifiers = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    identifiers
        .filter(|word| {
            let rest = prefixes.iter().find_map(|prefix| word.strip_prefix(prefix));
            rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
                && !word.ends_with("_t")
        })
        .map(str::to_string)
}

/// A jump for each function through its entry, which at first leads to `resolve` with its number.
fn assembly(functions: &[(usize, String)]) -> String {
    let mut text = String::from(".section .text.gpu_libraries,\"ax\",@progbits\n");
    for (i, (_, name)) in functions.iter().enumerate() {
        let _ = writeln!(
            text,
            ".globl {name}\n.type {name},@function\n{name}: jmpq *gpu_library_entries+{}(%rip)",
            8 * i
        );
        let _ = writeln!(
            text,
            "{FIRST}{i}: pushq ${i}\njmp gpu_library_resolve_first\n.size {name}, .-{name}"
        );
    }
    // Saves all registers in which a caller may have passed arguments.
    text.push_str("gpu_library_resolve_first:\n");
    let integers = ["rdi", "rsi", "rdx", "rcx", "r8", "r9", "rax"];
    for register in integers {
        let _ = writeln!(text, "pushq %{register}");
    }
    text.push_str("subq $136, %rsp\n");
    for i in 0..8 {
        let _ = writeln!(text, "movups %xmm{i}, {}(%rsp)", 16 * i);
    }
    text.push_str("movq 192(%rsp), %rdi\ncall kernels_gpu_library_resolve\nmovq %rax, %r11\n");
    for i in 0..8 {
        let _ = writeln!(text, "movups {}(%rsp), %xmm{i}", 16 * i);
    }
    text.push_str("addq $136, %rsp\n");
    for register in integers.iter().rev() {
        let _ = writeln!(text, "popq %{register}");
    }
    text.push_str("addq $8, %rsp\njmpq *%r11\n");
    text.push_str(".section .data.rel.gpu_libraries,\"aw\",@progbits\n.p2align 3\n.globl gpu_library_entries\ngpu_library_entries:\n");
    for i in 0..functions.len() {
        let _ = writeln!(text, ".quad {FIRST}{i}");
    }
    text.push_str(".text\n");
    text
}

/// Prefix of the local labels for first calls.
const FIRST: &str = ".Lgpu_library_first_";

fn table(functions: &[(usize, String)], major: &str, include: &Path) -> String {
    let mut text = format!("pub static LIBRARIES: [Library; {}] = [\n", LIBRARIES.len());
    for library in LIBRARIES {
        let (name, soname, status) = (library.name, (library.soname)(major), library.status);
        let _ = writeln!(text, "    Library::new({name:?}, c{soname:?}, {status}),");
    }
    text.push_str("];\n\npub static FUNCTIONS: &[(usize, &CStr)] = &[\n");
    for (library, name) in functions {
        let _ = writeln!(text, "    ({library}, c{name:?}),");
    }
    let root = include.parent().unwrap_or(include).display().to_string();
    let _ = writeln!(
        text,
        "];\n\n/// Of the toolkit that this was built with.\npub const TOOLKIT: &CStr = c{root:?};"
    );
    text
}

fn write(name: &str, text: &str) -> Result<(), String> {
    let path = sources::out_dir().join(name);
    fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
}
