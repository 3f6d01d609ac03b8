//! The size rule and resizing, against transformers and torchvision.

use crate::{expected, fixture, pair, sha256};
use pegainfer_images::{
    Detail, ImageError, ImageLimits, ImageProcessor, Resolution, decode, probe, resize, smart_resize,
};

const LIMITS: ImageLimits =
    ImageLimits { max_bytes: 1 << 20, max_pixels: 1 << 32, max_side: 20_000, decoder_bytes: 1 << 20 };

/// Sizes, and what transformers' `smart_resize` makes of them with at most 16,777,216, 4,194,304 and 262,144 pixels.
const SIZES: [[(u32, u32); 4]; 18] = [
    [(640, 480), (640, 480), (640, 480), (576, 416)],
    [(1280, 720), (1280, 704), (1280, 704), (672, 384)],
    [(1920, 1080), (1920, 1088), (1920, 1088), (672, 384)],
    [(2560, 1440), (2560, 1440), (2560, 1440), (672, 384)],
    [(3840, 2160), (3840, 2176), (2720, 1536), (672, 384)],
    [(4032, 3024), (4032, 3008), (2336, 1760), (576, 416)],
    [(560, 336), (576, 320), (576, 320), (576, 320)],
    [(336, 560), (320, 576), (320, 576), (320, 576)],
    [(1, 1), (256, 256), (256, 256), (256, 256)],
    [(200, 1), (3648, 32), (3648, 32), (3648, 32)],
    [(16, 3200), (32, 3648), (32, 3648), (32, 3648)],
    [(15, 2999), (32, 3648), (32, 3648), (32, 3648)],
    [(255, 257), (256, 256), (256, 256), (256, 256)],
    [(4112, 4096), (4096, 4096), (2048, 2016), (512, 480)],
    [(8192, 8192), (4096, 4096), (2048, 2048), (512, 512)],
    [(12000, 60), (12000, 64), (12000, 64), (7232, 32)],
    [(48, 80), (224, 352), (224, 352), (224, 352)],
    [(16384, 4096), (8192, 2048), (4096, 1024), (1024, 256)],
];

#[test]
fn sizes_are_those_of_transformers() {
    for [(width, height), model, server, low] in SIZES {
        for (max_area, expected) in [(16_777_216, model), (4_194_304, server), (262_144, low)] {
            assert_eq!(smart_resize(width, height, 65_536, max_area).unwrap(), expected, "{width} x {height}");
        }
    }
    assert_eq!(smart_resize(201, 1, 65_536, 16_777_216).unwrap_err().to_string().matches("201 x 1").count(), 1);
    assert!(smart_resize(u32::MAX, 1, 1, 1).is_err() && smart_resize(0, 0, 1, 1).is_err());
}

/// A header of that size: the start of a GIF file.
fn header(width: u16, height: u16) -> pegainfer_images::Header {
    let bytes = [&b"GIF89a"[..], &width.to_le_bytes(), &height.to_le_bytes()].concat();
    probe(&bytes, &LIMITS).unwrap()
}

#[test]
fn detail_and_pixels_choose_the_area() {
    let processor = ImageProcessor::default();
    let size = |processor: &ImageProcessor, detail: &str, min_pixels: Option<u64>, max_pixels: Option<u64>| {
        let resolution = Resolution { detail: detail.parse()?, min_pixels, max_pixels };
        processor.size(&header(3840, 2160), &resolution)
    };
    for (detail, expected) in
        [("low", (672, 384)), ("auto", (2720, 1536)), ("high", (2720, 1536)), ("original", (2720, 1536))]
    {
        assert_eq!(size(&processor, detail, None, None).unwrap(), expected, "{detail}");
    }
    let original = processor.with_original_detail(true);
    assert_eq!(size(&original, "original", None, None).unwrap(), (3840, 2176));
    assert_eq!((processor.max_tokens(), original.max_tokens()), (4_096, 16_384));
    assert_eq!(size(&processor, "auto", None, Some(262_144)).unwrap(), (672, 384));
    assert_eq!(size(&processor, "auto", None, Some(1 << 40)).unwrap(), (2720, 1536));
    assert_eq!(
        processor.size(&header(64, 64), &Resolution { min_pixels: Some(1), ..Resolution::default() }).unwrap(),
        (64, 64)
    );
    assert!(matches!(
        size(&processor, "auto", Some(4_194_305), None),
        Err(ImageError::MinPixels { max: 4_194_304, .. })
    ));
    assert!(matches!(size(&processor, "auto", None, Some(1_023)), Err(ImageError::MaxPixels { max: 1_023, .. })));
    assert!(matches!("ultra".parse::<Detail>(), Err(ImageError::UnknownDetail(_))));
    assert_eq!("".parse::<Detail>().unwrap_err().to_string(), "detail is \"\"; use low, high, original or auto");
}

#[test]
fn no_image_has_more_tokens_than_the_limit() {
    for max_tokens in [1, 2, 7, 63, 64, 65, 100, 113, 200, 4_096] {
        let processor = ImageProcessor::default().with_max_tokens(max_tokens);
        assert_eq!(processor.max_tokens(), max_tokens);
        for (width, height) in [(1, 1), (200, 1), (1, 200), (16_000, 80), (100, 90), (5_000, 4_999), (300, 200)] {
            let tokens = processor.tokens(&header(width, height), &Resolution::default()).unwrap();
            assert!((1..=max_tokens).contains(&tokens), "{tokens} of {max_tokens} for {width} x {height}");
        }
    }
}

#[test]
fn pictures_equal_those_of_transformers() {
    for case in expected("resized").as_array().unwrap() {
        let name = case["file"].as_str().unwrap();
        let bytes = fixture(&format!("sources/{name}"));
        let area = case["longest_edge"].as_u64().unwrap();
        let config = format!(r#"{{"size": {{"longest_edge": {area}, "shortest_edge": 65536}}}}"#);
        let processor = ImageProcessor::from_config(Some(&config), None).unwrap();
        let (limits, resolution) = (ImageLimits::default(), Resolution::default());
        let picture = processor.process(&bytes, &limits, &resolution).unwrap();
        let header = probe(&bytes, &limits).unwrap();
        assert_eq!((header.width, header.height), pair(&case["source_size_wh"]), "{name}");
        assert_eq!((picture.width(), picture.height()), pair(&case["resized_size_wh"]), "{name}");
        assert_eq!(u64::from(picture.tokens()), case["tokens"].as_u64().unwrap(), "{name}");
        assert_eq!(processor.tokens(&header, &resolution).unwrap(), picture.tokens(), "{name}");
        let stem = name.split('.').next().unwrap();
        let suffix = if area == 100_352 { "_max_100352" } else { "" };
        let reference = decode(&fixture(&format!("resized/{stem}{suffix}.png")), &limits).unwrap();
        assert_eq!(sha256(&reference.pixels), case["resized_rgb_sha256"].as_str().unwrap(), "{name}");
        // Decoders of JPEG differ by a few levels before the image is scaled.
        let max_difference = if name.ends_with(".jpg") { 6 } else { 0 };
        let differences = picture.pixels().iter().zip(&reference.pixels).map(|(a, b)| a.abs_diff(*b));
        assert!(differences.max() <= Some(max_difference), "{name}");
    }
}

#[test]
fn equal_pixels_are_equal_pictures_whatever_the_file() {
    let process = |bytes: &[u8]| {
        ImageProcessor::default().process(bytes, &ImageLimits::default(), &Resolution::default()).unwrap()
    };
    let (gif, animated) = (process(&fixture("odd/still.gif")), process(&fixture("odd/animated.gif")));
    assert_eq!(gif, animated);
    assert_ne!(gif, process(&fixture("odd/bilevel.png")));
    let scaled = resize(decode(&fixture("odd/still.gif"), &ImageLimits::default()).unwrap(), gif.width(), gif.height());
    assert!(scaled.pixels == gif.pixels()[..]);
}
