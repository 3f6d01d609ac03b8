//! Files that cannot be opened, and jobs that are not accepted.

use super::*;

#[test]
fn a_second_server_is_told_who_has_the_file() {
    let dir = TempDir::new("disk");
    for first in configs(&dir, 4, 8192) {
        let (store, _) = open(&first);
        for direct in [true, false] {
            let error =
                Store::open(&DiskConfig { direct, lock_wait: Duration::from_millis(30), ..first.clone() }).unwrap_err();
            assert!(matches!(error, DiskError::Locked { .. }), "{error}");
            assert!(error.to_string().contains("another server"), "{error}");
        }
        save(&store, 0..1);
        drop(store);
        let (store, opened) = open(&first);
        assert_eq!(verified(&store, &opened), [(0, 0)], "the second one changed nothing");
    }
}

#[test]
fn paths_that_are_no_files_are_refused() {
    let dir = TempDir::new("disk");
    let at = |path: PathBuf| Store::open(&DiskConfig { path, ..config(&dir, 4) }).unwrap_err();
    assert!(matches!(at(dir.path().to_owned()), DiskError::NotRegular { .. }));
    let error = at(dir.path().join("missing/kv"));
    assert!(matches!(error, DiskError::Io { operation: "open", .. }), "{error}");
    assert!(error.to_string().contains("missing/kv"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_directory_without_write_permission_is_an_error() {
    use std::os::unix::fs::PermissionsExt;
    let dir = TempDir::new("disk");
    let locked = dir.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, PermissionsExt::from_mode(0o555)).unwrap();
    // Root may write everywhere but in file systems of the kernel.
    let is_root = std::fs::write(locked.join("probe"), "").is_ok();
    let path = if is_root { PathBuf::from("/proc/pegainfer-kv") } else { locked.join("kv") };
    let error = Store::open(&DiskConfig { path, ..config(&dir, 4) }).unwrap_err();
    assert!(matches!(error, DiskError::Io { operation: "open", .. }), "{error}");
}

#[cfg(unix)]
#[test]
fn nobody_else_may_read_a_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let dir = TempDir::new("disk");
    let config = config(&dir, 4);
    drop(open(&config));
    assert_eq!(std::fs::metadata(&config.path).unwrap().permissions().mode() & 0o077, 0);
}

#[test]
fn sizes_that_hold_no_block_leave_no_file() {
    let dir = TempDir::new("disk");
    let config = config(&dir, 4);
    for bytes in [0, 8192, 4096 + 4096 + 8191] {
        let error = Store::open(&DiskConfig { bytes, ..config.clone() }).unwrap_err();
        assert!(matches!(error, DiskError::TooSmall { .. }), "{error}");
    }
    assert!(!config.path.exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_disk_without_enough_space_is_an_error_and_keeps_what_it_has() {
    let dir = TempDir::new("disk");
    let config = config(&dir, 4);
    let too_large = DiskConfig { bytes: 1 << 50, slot_bytes: 1 << 30, ..config.clone() };
    let error = Store::open(&too_large).unwrap_err();
    assert!(matches!(error, DiskError::NoSpace { .. }), "{error}");
    assert!(!config.path.exists(), "no new file is left");
    save(&open(&config).0, 0..4);
    assert!(Store::open(&too_large).is_err());
    let (store, opened) = open(&config);
    assert_eq!(verified(&store, &opened).len(), 4);
}

/// Mounting needs root; elsewhere only the test above runs.
#[cfg(target_os = "linux")]
#[test]
fn a_small_file_system_is_used_up_to_its_size() {
    let dir = TempDir::new("disk");
    let mount = |command: &str, arguments: &[&str]| {
        let output = std::process::Command::new(command).args(arguments).arg(dir.path()).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !mount("mount", &["-t", "tmpfs", "-o", "size=256k", "none"]) {
        return;
    }
    let fits = config(&dir, 20);
    let result = std::panic::catch_unwind(|| {
        let error = Store::open(&DiskConfig { bytes: 1 << 20, ..fits.clone() }).unwrap_err();
        assert!(matches!(error, DiskError::NoSpace { free, .. } if free <= 256 << 10), "{error}");
        let (store, opened) = open(&fits);
        save(&store, 0..opened.slots);
    });
    assert!(mount("umount", &[]));
    result.unwrap();
}

#[test]
fn what_is_not_polled_counts() {
    let dir = TempDir::new("disk");
    let config = DiskConfig { queue: 3, ..config(&dir, 16) };
    let (store, _) = open(&config);
    for slot in 0..3 {
        write(&store, slot, slot.into()).unwrap();
        read(&store, 0, 8 + slot).unwrap();
    }
    std::thread::sleep(Duration::from_millis(50));
    let refused = write(&store, 7, 7).unwrap_err();
    assert_eq!(refused.reason, RefusedReason::Full);
    assert!(refused.memory.unwrap().as_slice() == payload(7, 8192).as_slice(), "the memory comes back");
    assert_eq!(read(&store, 0, 7).unwrap_err().reason, RefusedReason::Full);
    wait(&store, 6);
    write(&store, 7, 7).unwrap();
    read(&store, 0, 8).unwrap();
    wait(&store, 2);
}
