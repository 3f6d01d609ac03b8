//! The hub's listing of a commit: its files with their sizes and hashes.

use super::client::{Client, RequestError};
use super::source::Source;
use pegainfer_terminal::progress::{Progress, Unit};
use ring::digest;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;

/// Maximum size of a listing in bytes.
const MAX_LISTING: u64 = 16 << 20;
const BUFFER: usize = 1 << 14;

/// Files of one commit.
pub(super) struct Listing {
    /// Id of the commit, or what stands for it: 40 hexadecimal digits.
    pub(super) commit: String,
    /// Files by path in the repository, as the hub spells it: not to be used as a local path. `None` if size or hash
    /// are missing or malformed, so that the file could not be verified.
    pub(super) files: BTreeMap<String, Option<FileInfo>>,
}

/// The hub's data about a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileInfo {
    /// Size in bytes.
    pub(super) size: u64,
    /// Hash of the content, which also names the file in the cache.
    pub(super) hash: Hash,
    /// The commit to ask for the file.
    pub(super) revision: String,
}

/// Hash of a file's content in lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Hash {
    /// SHA-256 of a file in large file storage (LFS), 64 digits.
    Sha256(String),
    /// SHA-1 as git computes it, for a file outside of LFS, 40 digits.
    GitBlob(String),
}

impl Hash {
    /// The digits.
    pub(super) fn digits(&self) -> &str {
        let (Self::Sha256(digits) | Self::GitBlob(digits)) = self;
        digits
    }

    /// A new hash computation over a content of `size` bytes.
    pub(super) fn start(&self, size: u64) -> digest::Context {
        match self {
            Self::Sha256(_) => digest::Context::new(&digest::SHA256),
            Self::GitBlob(_) => {
                let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                context
            }
        }
    }
}

/// The used fields of the response of `/api/models/ID/revision/REVISION?blobs=true`.
#[derive(Deserialize)]
struct RepoInfo {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Requests the commit of a revision of `id`: of a branch its newest one.
    pub(super) fn fetch(client: &Client, id: &str, revision: &str) -> Result<Self, RequestError> {
        let revision = client.source.revision(revision);
        let response = client.get(&client.url(&client.source.listing(id, revision)), 0)?;
        let rejected = |reason| RequestError::Rejected(format!("the hub's listing is not used: {reason}"));
        let length = response.body().content_length().unwrap_or(0);
        let mut progress = Progress::start(format!("reading the list of files of {id}"), Unit::Bytes, 0, length);
        let (mut reader, mut body, mut buffer) = (client.body(response), Vec::new(), vec![0; BUFFER]);
        loop {
            let count = reader.read(&mut buffer).map_err(|error| RequestError::Network(error.to_string()))?;
            if count == 0 {
                break;
            }
            body.extend_from_slice(&buffer[..count]);
            if body.len() as u64 > MAX_LISTING {
                return Err(rejected(format!("it has more than {MAX_LISTING} bytes")));
            }
            progress.set_total(length.max(body.len() as u64));
            progress.add(count as u64);
        }
        progress.finish();
        match client.source {
            Source::HuggingFace => Self::parse(&body),
            Source::ModelScope => Self::parse_modelscope(&body, revision),
        }
        .map_err(rejected)
    }

    /// Parses a listing, and checks its names and hashes.
    pub(super) fn parse(body: &[u8]) -> Result<Self, String> {
        let info: RepoInfo = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        if !is_hex(&info.sha, 40) {
            return Err("its commit id is not 40 hexadecimal digits".into());
        }
        let files = info.siblings.into_iter().map(|sibling| {
            let file = sibling.info(&info.sha);
            (sibling.rfilename, file)
        });
        let files = files.collect();
        Ok(Self { commit: info.sha, files })
    }
}

impl Sibling {
    fn info(&self, commit: &str) -> Option<FileInfo> {
        let (size, hash) = match (&self.lfs, &self.blob_id) {
            (Some(lfs), _) if is_hex(&lfs.sha256, 64) => (lfs.size, Hash::Sha256(lfs.sha256.clone())),
            (None, Some(id)) if is_hex(id, 40) => (self.size?, Hash::GitBlob(id.clone())),
            _ => return None,
        };
        Some(FileInfo { size, hash, revision: commit.to_owned() })
    }
}

/// True if the text is `digits` lower-case hexadecimal digits.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// True if the text is a plain file name.
pub(super) fn is_file_name(text: &str) -> bool {
    let valid = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    !text.is_empty() && text.len() <= 200 && !text.starts_with('.') && text.bytes().all(valid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hashes_and_commits_in_hexadecimal_digits_are_taken() {
        let (sha1, sha256) = ("a".repeat(40), "0".repeat(64));
        let listing = |commit: &str, blob: &str, lfs: &str| {
            let lfs = serde_json::json!({"sha256": lfs, "size": 5, "pointerSize": 9});
            let siblings = serde_json::json!([{"rfilename": "a", "size": 3, "blobId": blob},
                {"rfilename": "b", "size": 9, "blobId": sha1, "lfs": lfs}, {"rfilename": "c"}]);
            Listing::parse(serde_json::json!({"sha": commit, "siblings": siblings}).to_string().as_bytes())
        };
        let good = listing(&sha1, &sha1, &sha256).unwrap();
        assert_eq!(good.files.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(
            good.files["a"],
            Some(FileInfo { size: 3, hash: Hash::GitBlob(sha1.clone()), revision: sha1.clone() })
        );
        assert_eq!(
            good.files["b"],
            Some(FileInfo { size: 5, hash: Hash::Sha256(sha256.clone()), revision: sha1.clone() })
        );
        assert_eq!(good.files["c"], None);
        for bad in ["../../x", "/etc/x", "", "main", &"A".repeat(40), &"a".repeat(41), "a/b", &"\u{130}".repeat(20)] {
            assert!(listing(bad, &sha1, &sha256).is_err(), "{bad}");
            assert!(listing(&sha1, bad, bad).unwrap().files.values().all(Option::is_none), "{bad}");
        }
        assert!(Listing::parse(b"[]").is_err() && Listing::parse(b"").is_err());
    }

    #[test]
    fn a_hash_is_that_of_git_and_sha256sum() {
        let digits = |hash: Hash| {
            let mut context = hash.start(6);
            context.update(b"hello\n");
            super::super::blob::hex(context.finish().as_ref())
        };
        assert_eq!(digits(Hash::GitBlob(String::new())), "ce013625030ba8dba906f756967f9e9ca394464a");
        let expected = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(digits(Hash::Sha256(String::new())), expected);
    }

    #[test]
    fn file_names_lead_nowhere() {
        assert!(is_file_name("model-00001-of-00002.safetensors"));
        for name in ["", ".", "..", ".x", "a/b", "../x", "/x", "a\\b", "a\0", "a b", "é", &"a".repeat(201)] {
            assert!(!is_file_name(name), "{name:?}");
        }
    }
}
