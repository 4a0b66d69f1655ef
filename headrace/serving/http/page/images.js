/* Images of messages: chosen, dropped or pasted, made small enough to be kept in the browser, and shown. */

import { iconButton, make } from "./dom.js";

const LONGEST = 1024, // pixels of the longer side
  MOST = 8, // in one message
  QUALITY = 0.85;

/* The images of a stored turn or draft, whatever was stored. */
export function imagesIn(stored) {
  if (!Array.isArray(stored)) return [];
  return stored.filter((each) => typeof each === "string" && each.startsWith("data:image/")).slice(0, MOST);
}

/* The image files among those of a drop or a paste. */
export function imageFiles(transfer) {
  return [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
}

/* The image of a file as a data URI, upright and on white; null for a file that this browser cannot show. */
export async function readImage(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    return null;
  }
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = make("canvas", {
    width: Math.max(1, Math.round(bitmap.width * scale)),
    height: Math.max(1, Math.round(bitmap.height * scale)),
  });
  const brush = canvas.getContext("2d");
  brush.fillStyle = "white";
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

/* A row of small images. With `remove`, each has a button that takes it away. */
export function showImages(images, remove = null) {
  return images.map((source, index) =>
    make(
      "figure",
      { className: "picture" },
      make("img", { src: source, alt: `Image ${index + 1} of ${images.length}` }),
      remove && iconButton("close", `Remove image ${index + 1}`, () => remove(index)),
    ),
  );
}

/* The images of the message that is being written. Calls `changed(images)` when they change, `refused(text)` when some
   are left out. */
export class Tray {
  constructor(node, { changed, refused }) {
    this.node = node;
    this.changed = changed;
    this.refused = refused;
    this.images = [];
  }

  show(images) {
    this.images = images;
    this.node.hidden = !images.length;
    this.node.replaceChildren(...showImages(images, (index) => this.set(images.filter((_, i) => i !== index))));
  }

  set(images) {
    this.show(images);
    this.changed(images);
  }

  async add(files) {
    const found = await Promise.all(files.map(readImage)),
      read = found.filter(Boolean),
      all = [...this.images, ...read];
    this.set(all.slice(0, MOST));
    if (all.length > MOST) this.refused(`A message takes ${MOST} images at most.`);
    else if (read.length < files.length) this.refused("This browser cannot show one of the images.");
  }
}
