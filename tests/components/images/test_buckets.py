"""The order of images in buckets."""

from collections import Counter

from torchtitan.components.images.buckets import BucketOrder
from torchtitan.components.images.pixel_rows import nearest

SIZES, BATCH = [5, 0, 8, 3], 4


def test_every_image_has_one_place_in_an_epoch_and_batches_one_bucket():
    order = BucketOrder(SIZES, BATCH, shuffle=True, seed=3)
    assert order.places_of_epoch == (2 + 2 + 1) * BATCH  # the last batch of a bucket is padded
    orders = []
    for epoch in range(3):
        first = epoch * order.places_of_epoch
        images = [order.image(first + n) for n in range(order.places_of_epoch)]
        counts = Counter(image for image in images if image[1] is not None)
        expected = {(b, n): 1 for b, size in enumerate(SIZES) for n in range(size)}
        assert counts == expected
        batches = [images[n : n + BATCH] for n in range(0, len(images), BATCH)]
        assert all(len({bucket for bucket, _ in batch}) == 1 for batch in batches)
        orders.append(images)
    assert orders[0] != orders[1] != orders[2]
    assert [b for b, _ in orders[0][::BATCH]] != sorted(b for b, _ in orders[0][::BATCH])


def test_without_shuffling_the_order_is_that_of_the_data():
    order = BucketOrder(SIZES, BATCH, shuffle=False, seed=3)
    images = [order.image(n) for n in range(order.places_of_epoch)]
    expected = [(b, n) for b, size in enumerate(SIZES) for n in range(size)]
    assert [image for image in images if image[1] is not None] == expected


def test_the_nearest_bucket_has_the_nearest_ratio():
    """The middle between 1:1 and 1:2 is 1:√2, so 1:1.5 is nearer to 1:2, and 1:1.3 to 1:1."""
    sizes = [(64, 64), (64, 128), (128, 64)]
    assert [nearest(sizes, (100, width)) for width in (100, 130, 150, 300)] == [0, 0, 1, 1]
    assert nearest(sizes, (300, 100)) == 2
