// The sections of the sidebar fold: that of the current page is open, and on the start page the first.
document.addEventListener("DOMContentLoaded", () => {
  const captions = [...document.querySelectorAll(".sidebar-tree .caption")];
  const sections = captions.map((caption) => caption.nextElementSibling);
  const current = Math.max(0, sections.findIndex((section) => section?.querySelector(".current-page")));
  captions.forEach((caption, index) => {
    const section = sections[index];
    if (!section) return;
    const show = (open) => {
      section.style.display = open ? "" : "none";
      caption.setAttribute("aria-expanded", String(open));
    };
    caption.setAttribute("role", "button");
    caption.tabIndex = 0;
    caption.addEventListener("click", () => show(section.style.display === "none"));
    caption.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      show(section.style.display === "none");
    });
    show(index === current);
  });
});
