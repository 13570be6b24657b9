//! The kernels' source files, and the compilation of changed ones.

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

/// The result of compiling one file.
pub struct Compiled {
    /// The file's name without extension.
    pub stem: String,
    pub object: PathBuf,
    /// The compiler's output.
    pub messages: String,
}

/// `kernels/cuda`.
pub fn dir() -> PathBuf {
    PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("cuda")
}

pub fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default())
}

/// Files of `dir` with one of these extensions, sorted.
pub fn files(dir: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut files: Vec<PathBuf> =
        entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
    files.retain(|path| {
        path.extension().and_then(OsStr::to_str).is_some_and(|e| extensions.contains(&e))
    });
    files.sort();
    Ok(files)
}

pub fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Compiles every file with the command that `command` makes for it and its object, several at a
/// time. Skips files with an object of the same file, headers and command.
pub fn compile(
    files: &[PathBuf],
    extension: &str,
    compiler: &str,
    command: impl Fn(&Path, &Path) -> Command + Sync,
) -> Result<Vec<Compiled>, String> {
    println!("cargo::rerun-if-changed={}", dir().display());
    let mut headers = DefaultHasher::new();
    compiler.hash(&mut headers);
    for folder in ["include", "emulator"] {
        for header in self::files(&dir().join(folder), &["cuh", "hpp"])? {
            read(&header)?.hash(&mut headers);
        }
    }
    let headers = headers.finish();
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let jobs = env::var("NUM_JOBS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1)
        .clamp(1, files.len().max(1));
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = files.get(i) else { return };
                    let result = compile_one(file, extension, headers, &command);
                    results.lock().unwrap_or_else(|e| e.into_inner()).push((i, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(|e| e.into_inner());
    results.sort_by_key(|(i, _)| *i);
    results.into_iter().map(|(_, result)| result).collect()
}

fn compile_one(
    file: &Path,
    extension: &str,
    headers: u64,
    command: &impl Fn(&Path, &Path) -> Command,
) -> Result<Compiled, String> {
    let stem = stem(file);
    let object = out_dir().join(format!("{stem}.{extension}"));
    let (stamp_file, messages_file) =
        (object.with_extension("stamp"), object.with_extension("messages"));
    let mut command = command(file, &object);
    let mut stamp = DefaultHasher::new();
    (headers, read(file)?, format!("{command:?}")).hash(&mut stamp);
    let stamp = stamp.finish().to_string();
    if object.exists() && fs::read_to_string(&stamp_file).is_ok_and(|old| old == stamp) {
        let messages = fs::read_to_string(&messages_file).unwrap_or_default();
        return Ok(Compiled { stem, object, messages });
    }
    let output = command
        .output()
        .map_err(|e| format!("{}: {e}", command.get_program().to_string_lossy()))?;
    let messages =
        String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!(
            "{} does not compile ({}):\n{messages}",
            file.display(),
            output.status
        ));
    }
    let write = |path: &Path, text: &str| {
        fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
    };
    write(&messages_file, &messages)?;
    write(&stamp_file, &stamp)?;
    Ok(Compiled { stem, object, messages: messages.into_owned() })
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Writes the list of compiled files that `tensor::gpu` includes.
pub fn write_modules(text: &str) -> Result<(), String> {
    let path = out_dir().join("modules.rs");
    fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
}
