class ImageReadMode:
    RGB = 3


def decode_jpeg(*args, **options):
    raise RuntimeError("there is no decoder of images here")


decode_image = decode_jpeg
