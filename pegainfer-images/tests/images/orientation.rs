//! The EXIF orientation, in each format that has one.

use crate::{fixture, sha256};
use pegainfer_images::{ImageLimits, decode, probe};
use png::{BitDepth, ColorType, Encoder};

/// Grey values of an image of 3 x 2 pixels that counts from 0, upright for the orientations 1 to 8: Pillow's
/// `exif_transpose`.
const UPRIGHT: [[u8; 6]; 8] = [
    [0, 1, 2, 3, 4, 5],
    [2, 1, 0, 5, 4, 3],
    [5, 4, 3, 2, 1, 0],
    [3, 4, 5, 0, 1, 2],
    [0, 3, 1, 4, 2, 5],
    [3, 0, 4, 1, 5, 2],
    [5, 2, 4, 1, 3, 0],
    [2, 5, 1, 4, 0, 3],
];

/// EXIF data of one field.
fn exif(orientation: u8, is_big_endian: bool) -> Vec<u8> {
    let big = [b'M', b'M', 0, 42, 0, 0, 0, 8, 0, 1, 0x01, 0x12, 0, 3, 0, 0, 0, 1, 0, orientation, 0, 0, 0, 0, 0, 0];
    let little = [b'I', b'I', 42, 0, 8, 0, 0, 0, 1, 0, 0x12, 0x01, 3, 0, 1, 0, 0, 0, orientation, 0, 0, 0, 0, 0, 0, 0];
    if is_big_endian { big.to_vec() } else { little.to_vec() }
}

/// A PNG file of 3 x 2 grey pixels that count from 0, with EXIF data before or after them.
fn png(exif: &[u8], is_before: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, 3, 2);
    encoder.set_color(ColorType::Grayscale);
    encoder.set_depth(BitDepth::Eight);
    let mut writer = encoder.write_header().unwrap();
    if is_before {
        writer.write_chunk(png::chunk::eXIf, exif).unwrap();
    }
    writer.write_image_data(&[0, 1, 2, 3, 4, 5]).unwrap();
    if !is_before {
        writer.write_chunk(png::chunk::eXIf, exif).unwrap();
    }
    writer.finish().unwrap();
    bytes
}

#[test]
fn images_are_turned_upright_as_in_pillow() {
    let limits = ImageLimits::default();
    for (orientation, upright) in (1..).zip(UPRIGHT) {
        for (is_big_endian, is_before) in [(false, false), (false, true), (true, false), (true, true)] {
            let bytes = png(&exif(orientation, is_big_endian), is_before);
            let (image, header) = (decode(&bytes, &limits).unwrap(), probe(&bytes, &limits).unwrap());
            let size = if orientation < 5 { (3, 2) } else { (2, 3) };
            assert_eq!((image.width, image.height, header.width, header.height), (size.0, size.1, size.0, size.1));
            let found: Vec<u8> = image.pixels.iter().step_by(3).copied().collect();
            assert_eq!(found, upright, "orientation {orientation}");
        }
    }
}

#[test]
fn unknown_orientations_change_nothing() {
    for data in [exif(0, true), exif(9, false), exif(6, true)[..20].to_vec(), b"MM\0*\xff\xff\xff\xff".to_vec(), vec![]]
    {
        let image = decode(&png(&data, true), &ImageLimits::default()).unwrap();
        let found: Vec<u8> = image.pixels.iter().step_by(3).copied().collect();
        assert_eq!((image.width, found), (3, UPRIGHT[0].to_vec()), "{data:?}");
    }
}

#[test]
fn webp_has_exif_after_its_pixels() {
    let limits = ImageLimits::default();
    let original = fixture("odd/alpha_lossless.webp");
    let bitstream = original.windows(4).position(|kind| kind == b"VP8L").unwrap();
    let canvas = [&b"VP8X\x0a\0\0\0"[..], &[1 << 3 | 1 << 4, 0, 0, 0, 63, 0, 0, 47, 0, 0]].concat();
    let exif = [b"Exif\0\0".to_vec(), exif(3, true)].concat();
    let chunks = [&canvas[..], &original[bitstream..], b"EXIF", &(exif.len() as u32).to_le_bytes(), &exif].concat();
    let bytes = [b"RIFF", &(chunks.len() as u32 + 4).to_le_bytes()[..], b"WEBP", &chunks].concat();
    let mut expected = decode(&original, &limits).unwrap().pixels;
    expected.as_chunks_mut::<3>().0.reverse();
    let found = decode(&bytes, &limits).unwrap();
    assert_eq!((found.width, found.height, sha256(&found.pixels)), (64, 48, sha256(&expected)));
}
