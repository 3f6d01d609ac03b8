//! The kinds of hubs, Hugging Face's and ModelScope's: addresses, variables, and names of revisions.

use ureq::http::Uri;

/// The revision that is taken if none is named.
pub(super) const MAIN: &str = "main";

/// The API that a hub speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Hugging Face's, which most mirrors speak too.
    HuggingFace,
    /// ModelScope's: <https://modelscope.cn>.
    ModelScope,
}

impl Source {
    /// The kind of the hub at `endpoint`, by its host.
    pub fn of(endpoint: &str) -> Self {
        let host = endpoint.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_ascii_lowercase));
        let domain = host.as_deref().map(|host| host.strip_prefix("www.").unwrap_or(host));
        match domain {
            Some("modelscope.cn" | "modelscope.ai") => Self::ModelScope,
            _ => Self::HuggingFace,
        }
    }

    /// The hub that is asked if none is named.
    pub fn endpoint(self) -> &'static str {
        match self {
            Self::HuggingFace => "https://huggingface.co",
            Self::ModelScope => "https://modelscope.cn",
        }
    }

    /// The variable with the token of this hub. No hub gets the token of another one.
    pub fn token_variable(self) -> &'static str {
        match self {
            Self::HuggingFace => "HF_TOKEN",
            Self::ModelScope => "MODELSCOPE_API_TOKEN",
        }
    }

    /// Path of a model's own page, after the endpoint.
    pub(super) fn page(self, id: &str) -> String {
        match self {
            Self::HuggingFace => format!("/{id}"),
            Self::ModelScope => format!("/models/{id}"),
        }
    }

    /// The revision by the name that this hub gives it.
    pub(super) fn revision(self, revision: &str) -> &str {
        if self == Self::ModelScope && revision == MAIN { "master" } else { revision }
    }

    /// Path of the listing of a revision, with sizes and hashes.
    pub(super) fn listing(self, id: &str, revision: &str) -> String {
        match self {
            Self::HuggingFace => format!("/api/models/{id}/revision/{revision}?blobs=true"),
            Self::ModelScope => format!("/api/v1/models/{id}/repo/files?Revision={revision}&Recursive=true"),
        }
    }

    /// Path of the content of a file at a commit.
    pub(super) fn file(self, id: &str, commit: &str, name: &str) -> String {
        match self {
            Self::HuggingFace => format!("/{id}/resolve/{commit}/{name}"),
            Self::ModelScope => format!("/api/v1/models/{id}/repo?Revision={commit}&FilePath={name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modelscope_is_known_by_its_host_alone() {
        for endpoint in ["https://modelscope.cn", "https://www.modelscope.cn/", "https://MODELSCOPE.ai:443"] {
            assert_eq!(Source::of(endpoint), Source::ModelScope, "{endpoint}");
        }
        for endpoint in [
            "https://huggingface.co",
            "https://hf-mirror.com/modelscope.cn",
            "https://modelscope.cn.example",
            "",
            "x y",
        ] {
            assert_eq!(Source::of(endpoint), Source::HuggingFace, "{endpoint}");
        }
    }
}
