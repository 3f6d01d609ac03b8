//! Property of images: any bytes become a picture with the number of tokens that their header has, or are refused with
//! one sentence. The decoder accepts no image with a refused header, and a data URL carries the same bytes.

use pegainfer_images::{
    ImageError, ImageLimits, ImageProcessor, Resolution, decode, from_base64, from_data_url, probe,
};
use std::path::Path;

/// Small limits, so that many inputs are tried in a second.
const LIMITS: ImageLimits =
    ImageLimits { max_bytes: 1 << 20, max_pixels: 1 << 18, max_side: 4_096, decoder_bytes: 1 << 22 };

/// Folders of the seeds.
const SEEDS: [&str; 2] = ["odd", "refused"];

/// Largest seed in bytes.
const MAX_SEED: usize = 3_000;

/// Checks an input: the bytes of a file, and also base64.
pub fn check(data: &[u8]) {
    let (processor, resolution) = (ImageProcessor::default().with_max_tokens(256), Resolution::default());
    let header = probe(data, &LIMITS);
    let decoded = decode(data, &LIMITS);
    match (&header, &decoded) {
        (Ok(header), Ok(image)) => {
            assert_eq!((image.width, image.height), (header.width, header.height));
            assert_eq!(image.pixels.len() as u64, 3 * header.pixels());
        }
        (Err(header), Err(decoded)) => assert_eq!(header.to_string(), decoded.to_string()),
        (Err(error), Ok(_)) => panic!("the header was refused: {error}"),
        (Ok(_), Err(error)) => assert_is_sentence(error),
    }
    match (processor.process(data, &LIMITS, &resolution), header) {
        (Ok(picture), Ok(header)) => {
            assert_eq!(picture.tokens(), processor.tokens(&header, &resolution).expect("a size"));
            assert!((1..=256).contains(&picture.tokens()), "{picture:?}");
        }
        (Ok(picture), Err(error)) => panic!("{picture:?} although the header was refused: {error}"),
        (Err(error), _) => assert_is_sentence(&error),
    }
    check_text(data);
}

fn check_text(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        for result in [from_base64(text, &LIMITS), from_data_url(text, &LIMITS)] {
            match result {
                Ok(bytes) => assert!(bytes.len() <= text.len() / 4 * 3 + 2, "{} bytes", bytes.len()),
                Err(error) => assert_is_sentence(&error),
            }
        }
    }
    let url = format!("data:;base64,{}", base64(data));
    assert_eq!(from_data_url(&url, &LIMITS).expect("valid base64"), data);
}

fn assert_is_sentence(error: &ImageError) {
    let message = error.to_string();
    assert!(!message.contains('\n') && message.len() < 1_000, "one sentence: {message}");
}

/// Base64 without padding.
pub fn base64(data: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let encode = |chunk: &[u8]| {
        let bits = chunk.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        (0..=chunk.len()).map(move |i| char::from(ALPHABET[(bits >> (18 - 6 * i)) as usize & 63])).collect::<String>()
    };
    data.chunks(3).map(encode).collect()
}

/// Small files of each format, and texts.
pub fn seeds() -> Vec<Vec<u8>> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-images/tests/fixtures");
    let files = SEEDS.iter().flat_map(|folder| std::fs::read_dir(fixtures.join(folder)).expect("fixtures"));
    let mut paths: Vec<_> = files.map(|entry| entry.expect("a fixture").path()).collect();
    paths.sort();
    let files = paths.iter().map(|path| std::fs::read(path).expect("a fixture"));
    let mut seeds: Vec<Vec<u8>> = files.filter(|bytes| bytes.len() <= MAX_SEED).collect();
    seeds.push(b"data:image/png;base64,iVBORw0KGgo=".to_vec());
    seeds.push(b"/+ 8\n=".to_vec());
    seeds
}
