//! ModelScope's listing of a repository.

use super::blob::hex;
use super::listing::{FileInfo, Hash, Listing, is_hex};
use ring::digest;
use serde::Deserialize;

/// The used fields of the response of `/api/v1/models/ID/repo/files`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Response {
    /// 200, or a number of ModelScope's own.
    code: i64,
    message: Option<String>,
    data: Option<Data>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    files: Option<Vec<File>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct File {
    path: String,
    /// `blob` of a file, `tree` of a folder.
    r#type: Option<String>,
    size: Option<u64>,
    sha256: Option<String>,
    /// The commit that last changed the file.
    revision: Option<String>,
}

impl Listing {
    /// Parses a listing of ModelScope, and checks its names and hashes. It names no commit of the repository, so a hash
    /// of all names, sizes and hashes stands for it.
    pub(super) fn parse_modelscope(body: &[u8], revision: &str) -> Result<Self, String> {
        let response: Response = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        if response.code != 200 {
            return Err(format!("{} (code {})", response.message.unwrap_or_default(), response.code));
        }
        let files = response.data.and_then(|data| data.files).ok_or("it has no files")?;
        let files = files.into_iter().filter(|file| file.r#type.as_deref() != Some("tree")).map(|file| {
            let info = file.info(revision);
            (file.path, info)
        });
        let mut listing = Self { commit: String::new(), files: files.collect() };
        listing.commit = listing.name();
        Ok(listing)
    }

    fn name(&self) -> String {
        let mut context = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
        for (path, info) in &self.files {
            let (size, hash) = info.as_ref().map_or((0, ""), |info| (info.size, info.hash.digits()));
            context.update(format!("{size} {hash} {path}\n").as_bytes());
        }
        hex(context.finish().as_ref())
    }
}

impl File {
    fn info(&self, revision: &str) -> Option<FileInfo> {
        let digits = self.sha256.as_ref()?.to_ascii_lowercase();
        let hash = is_hex(&digits, 64).then_some(Hash::Sha256(digits))?;
        let own = self.revision.clone().filter(|commit| is_hex(commit, 40));
        Some(FileInfo { size: self.size?, hash, revision: own.unwrap_or_else(|| revision.to_owned()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn parse(files: &Value) -> Result<Listing, String> {
        let response = json!({"Code": 200, "Success": true, "Data": {"Files": files}});
        Listing::parse_modelscope(response.to_string().as_bytes(), "master")
    }

    #[test]
    fn files_have_their_hash_and_their_own_commit() {
        let (sha, commit) = ("Ab".repeat(32), "c".repeat(40));
        let file = |path: &str, sha: &str, revision: &str| json!({"Path": path, "Type": "blob", "Size": 7, "Sha256": sha, "Revision": revision});
        let files = json!([file("a/b.json", &sha, &commit), file("x", "../../x", "y"), file("z", &sha, "../.."),
            {"Path": "a", "Type": "tree", "Size": 0, "Sha256": ""}]);
        let listing = parse(&files).unwrap();
        let hash = Hash::Sha256("ab".repeat(32));
        assert_eq!(listing.files["a/b.json"], Some(FileInfo { size: 7, hash: hash.clone(), revision: commit }));
        assert_eq!(listing.files["z"], Some(FileInfo { size: 7, hash, revision: "master".into() }));
        assert_eq!(listing.files["x"], None, "a hash that is no hash");
        assert_eq!(listing.files.len(), 3, "folders are no files");
        assert!(is_hex(&listing.commit, 40), "{}", listing.commit);
        let other = parse(&json!([file("a/b.json", &"0".repeat(64), "")])).unwrap();
        assert_ne!(listing.commit, other.commit);
    }

    #[test]
    fn refusals_in_a_good_response_are_told() {
        let refused = json!({"Code": 10_010_205_001_i64, "Message": "model not found", "Data": null});
        let error = Listing::parse_modelscope(refused.to_string().as_bytes(), "master").err().unwrap();
        assert_eq!(error, "model not found (code 10010205001)");
        for bad in [json!({"Code": 200}), json!({"Code": 200, "Data": {}}), json!([]), json!({"Data": {"Files": []}})] {
            assert!(Listing::parse_modelscope(bad.to_string().as_bytes(), "master").is_err(), "{bad}");
        }
    }
}
