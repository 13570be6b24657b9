//! Entry points for fuzzing private parsers of input files (`tests/fuzz`).

use std::path::Path;

use super::index_file::IndexFile;

/// Reads a file of three cached arrays, and some of their elements.
pub fn index_cache(path: &Path) {
    let Ok(Some(file)) = IndexFile::open(path, 3) else { return };
    for array in 0..3 {
        for first in [0, 1, file.len(array).wrapping_sub(1), u64::MAX] {
            let _ = (file.get::<1>(array, first), file.get::<2>(array, first));
        }
    }
}
