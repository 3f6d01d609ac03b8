//! Hashes of keys, addresses and salts that nobody outside can compute.

use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// SipHash with a secret key: random in each process, or from a file, so that salts of cached prefixes that outlive the
/// process stay the same.
#[derive(Debug, Clone)]
pub struct KeyedHash([u64; 2]);

impl Default for KeyedHash {
    /// A random key.
    fn default() -> Self {
        let random = RandomState::new();
        Self([random.hash_one(0), random.hash_one(1)])
    }
}

impl KeyedHash {
    /// The key in the file beside `path` that has its name and `.key` after it. Makes the file if there is none.
    pub fn beside(path: &Path) -> Result<Self> {
        let mut name = OsString::from(path);
        name.push(".key");
        let path = PathBuf::from(name);
        let key = Self::at(&path).with_context(|| format!("the key of salts in {}", path.display()))?;
        Ok(key)
    }

    fn at(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        match options.open(path) {
            Ok(mut file) => {
                let Self(keys) = Self::default();
                file.write_all(&keys.map(u64::to_le_bytes).concat())?;
                Ok(Self(keys))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let mut bytes = Vec::new();
                File::open(path)?.take(17).read_to_end(&mut bytes)?;
                let (keys, rest) = bytes.as_chunks::<8>();
                ensure!(
                    keys.len() == 2 && rest.is_empty(),
                    "it does not have 16 bytes; delete it, and the KV file beside it"
                );
                Ok(Self([keys[0], keys[1]].map(u64::from_le_bytes)))
            }
            Err(error) => Err(error.into()),
        }
    }
}

#[expect(deprecated, reason = "the only hasher of std with a key of one's own")]
impl BuildHasher for KeyedHash {
    type Hasher = std::hash::SipHasher;

    fn build_hasher(&self) -> Self::Hasher {
        std::hash::SipHasher::new_with_keys(self.0[0], self.0[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_testing::TempDir;

    #[test]
    fn a_key_beside_a_file_is_always_the_same_and_others_are_not() {
        let dir = TempDir::new("keyed-hash");
        let path = dir.path().join("kv");
        let first = KeyedHash::beside(&path).unwrap().hash_one("a");
        assert_eq!(KeyedHash::beside(&path).unwrap().hash_one("a"), first);
        assert_ne!(KeyedHash::default().hash_one("a"), first);
        assert_ne!(KeyedHash::default().hash_one("a"), KeyedHash::default().hash_one("a"));
        std::fs::write(dir.path().join("kv.key"), "short").unwrap();
        let error = format!("{:#}", KeyedHash::beside(&path).unwrap_err());
        assert!(error.contains("kv.key") && error.contains("16 bytes"), "{error}");
        assert!(KeyedHash::beside(&dir.path().join("nowhere/kv")).is_err());
    }
}
