//! An image as a request has it.

use crate::api::schema::Body;
use crate::error::ApiError;
use pegainfer_images::{Detail, ImageError};
use std::fmt;

/// An image of a message, or another part that models of text do not read.
#[derive(Debug, Clone, PartialEq)]
pub struct ImagePart {
    /// Its place in the request, such as `messages[1].content[0]`.
    pub at: String,
    /// Where its file is. The error is for models that read images, if this is no image that they can read.
    pub source: Result<ImageSource, ApiError>,
    /// What models of text read instead.
    pub unread: Unread,
}

/// The file of an image in a request.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSource {
    /// Where its bytes are.
    pub content: ImageContent,
    /// Level of detail.
    pub detail: Detail,
}

/// Where the bytes of an image's file are.
#[derive(Clone, PartialEq)]
pub enum ImageContent {
    /// In base64.
    Base64(String),
    /// In a data URL.
    DataUrl(String),
    /// On another server, at this URL.
    Remote(String),
    /// Here, because another server has sent them.
    Fetched(Vec<u8>),
}

/// What models of text read instead of a part.
#[derive(Debug, Clone, PartialEq)]
pub enum Unread {
    /// Nothing: the request is refused.
    Refused(ApiError),
    /// A note.
    Note {
        /// The note.
        note: String,
        /// Name of the part for the header `x-ignored-fields`.
        field: String,
    },
}

/// Length, without the text.
impl fmt::Debug for ImageContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base64(text) => write!(f, "Base64({} bytes)", text.len()),
            Self::DataUrl(text) => write!(f, "DataUrl({} bytes)", text.len()),
            Self::Remote(url) => write!(f, "Remote({} bytes)", url.len()),
            Self::Fetched(bytes) => write!(f, "Fetched({} bytes)", bytes.len()),
        }
    }
}

impl ImageSource {
    /// An image of OpenAI's APIs with this URL and level of detail, in the part at `at` of a field.
    pub fn openai((field, at): (&str, &str), url: Option<String>, detail: Option<&str>) -> Result<Self, ApiError> {
        let source = Self::url((field, at), url)?;
        let detail = detail.map_or(Ok(Detail::Auto), str::parse);
        Ok(Self { detail: detail.map_err(|error: ImageError| invalid(field, at, error))?, ..source })
    }

    /// An image with this URL.
    pub fn url((field, at): (&str, &str), url: Option<String>) -> Result<Self, ApiError> {
        let Some(text) = url.filter(|url| !url.trim().is_empty()) else {
            return Err(invalid(field, at, format!("the image's URL is missing or empty; {SEND}")));
        };
        let is_remote =
            |scheme: &str| text.trim_start().get(..scheme.len()).is_some_and(|s| s.eq_ignore_ascii_case(scheme));
        let is_remote = is_remote("http://") || is_remote("https://");
        let content = if is_remote { ImageContent::Remote(text) } else { ImageContent::DataUrl(text) };
        Ok(Self { content, detail: Detail::Auto })
    }

    /// An image as base64, without a URL.
    pub fn base64(text: String) -> Self {
        Self { content: ImageContent::Base64(text), detail: Detail::Auto }
    }
}

impl Unread {
    /// The note, whose part is reported as a field of the body without effect.
    pub fn text_for(self, body: &mut Body<'_>) -> Result<String, ApiError> {
        let mut ignored = Vec::new();
        let text = self.text(&mut ignored);
        ignored.into_iter().for_each(|field| body.ignore(field));
        text
    }

    /// The note; `ignored` receives the name of the part.
    pub fn text(self, ignored: &mut Vec<String>) -> Result<String, ApiError> {
        match self {
            Self::Refused(error) => Err(error),
            Self::Note { note, field } => {
                if !ignored.contains(&field) {
                    ignored.push(field);
                }
                Ok(note)
            }
        }
    }
}

/// What to send.
pub const SEND: &str = "send a data URL such as data:image/png;base64,iVBORw0KGgo...";

/// 400 about the part at `at`, in a field.
pub fn invalid(field: &str, at: &str, message: impl fmt::Display) -> ApiError {
    ApiError::invalid(field, format!("{at}: {message}")).with_code("invalid_image")
}
