//! Files and folders that belong to this user alone, or that no other user could have placed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Does not follow links, and does not wait for the other end of a pipe.
const HERE: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;

/// The id of the user with whose rights this process runs.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Creates `folder` and its missing parents, for this user alone. An existing folder stays
/// unchanged.
///
/// # Errors
/// If the system refuses.
pub fn create_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// If other users can write to `folder`, the reason and what to do about it.
///
/// # Errors
/// If the folder cannot be examined.
pub fn exposed(folder: &Path) -> io::Result<Option<String>> {
    let (link, there) = (fs::symlink_metadata(folder)?, fs::metadata(folder)?);
    // In `/tmp` any user can create links.
    for found in [&link, &there] {
        if !is_own(found.uid(), folder) {
            return Ok(Some(format!("belongs to another user ({})", found.uid())));
        }
    }
    let by_group = there.mode() & 0o020 != 0 && !is_own_group(&there);
    let by_all = there.mode() & 0o002 != 0;
    let who = if by_all { "every user" } else { "its group" };
    // Folders such as `/tmp` are shared on purpose.
    let is_shared = by_all && there.mode() & 0o1000 != 0;
    let remedy = if is_shared {
        "name a folder in it".into()
    } else {
        format!("fix this with `chmod go-w {}`", folder.display())
    };
    Ok((by_group || by_all).then(|| format!("is writable by {who}: {remedy}")))
}

/// Whether `owner` is this user or root.
fn is_own(owner: u32, folder: &Path) -> bool {
    // On some network file systems this user has another id.
    let there = || {
        tempfile::tempfile_in(folder)
            .and_then(|file| file.metadata())
            .is_ok_and(|file| file.uid() == owner)
    };
    owner == user() || owner == 0 || there()
}

/// Whether only this user is in the folder's group. It is assumed so if the group has the same id
/// as the user, the usual scheme of one group per user.
fn is_own_group(folder: &fs::Metadata) -> bool {
    folder.gid() == folder.uid() && folder.gid() == rustix::process::getegid().as_raw()
}

/// Opens the file `path` for locking, and creates it if needed. Does not follow links, and does not
/// change the file.
///
/// # Errors
/// If the system refuses, also because `path` is a link.
pub fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(HERE)
        .open(path)
}

/// Opens the file `path` for reading, but no link and no file that would block.
///
/// # Errors
/// If the system refuses, or it is not a regular file.
pub fn open_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(HERE).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a regular file"))
    }
}

/// Creates the file `path` for writing and replaces what exists there. It is always a new file,
/// even if another user placed a link or a file there.
///
/// # Errors
/// If the system refuses, or another process creates something there at the same time.
pub fn replace(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new().write(true).create_new(true).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn a_folder_that_others_can_write_into_is_exposed() {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("a/b");
        create_folder(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        assert_eq!(exposed(&folder).unwrap(), None);
        for (mode, remedy) in
            [(0o777, "`chmod go-w "), (0o1777, "name a folder in it"), (0o702, "`chmod go-w ")]
        {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
            let why = exposed(&folder).unwrap().unwrap();
            assert!(why.contains("by every user") && why.contains(remedy), "{mode:o}: {why}");
        }
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(exposed(&folder).unwrap(), None);
    }

    #[test]
    fn a_folder_of_another_user_is_exposed_and_a_link_of_another_user_is_too() {
        if user() != 0 {
            return eprintln!("skipped: only root gives files away");
        }
        let outer = tempfile::tempdir().unwrap();
        let [folder, link] = ["folder", "link"].map(|name| outer.path().join(name));
        create_folder(&folder).unwrap();
        symlink(&folder, &link).unwrap();
        assert_eq!(exposed(&link).unwrap(), None);
        std::os::unix::fs::lchown(&link, Some(12_345), None).unwrap();
        assert!(exposed(&link).unwrap().unwrap().contains("another user (12345)"));
        chown(&folder, Some(12_345), Some(12_345)).unwrap();
        assert!(exposed(&folder).unwrap().unwrap().contains("another user (12345)"));
        // Owned by a group that has other members.
        chown(&folder, Some(0), Some(12_345)).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o770)).unwrap();
        assert!(exposed(&folder).unwrap().unwrap().contains("by its group"));
    }

    #[test]
    fn a_link_or_pipe_that_was_put_in_place_is_neither_written_through_nor_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let [target, link] = ["target", "link"].map(|name| folder.path().join(name));
        fs::write(&target, "kept").unwrap();
        symlink(&target, &link).unwrap();
        assert!(
            open_lock(&link).is_err() && open_file(&link).is_err() && open_file(&target).is_ok()
        );
        io::Write::write_all(&mut replace(&link).unwrap(), b"new").unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        assert!(open_lock(&pipe).is_err() && open_file(&pipe).is_err());
        assert_eq!(
            [fs::read(&target).unwrap(), fs::read(&link).unwrap()],
            [b"kept".to_vec(), b"new".to_vec()]
        );
    }
}
